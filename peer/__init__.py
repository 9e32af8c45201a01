"""What one client does: data, models, learning, methods. One operating-system process."""
