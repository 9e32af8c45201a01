"""How a swarm is started, watched, stopped and reported."""
