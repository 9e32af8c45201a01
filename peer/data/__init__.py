"""Data of a peer: loading a set, dealing it out, holding some of it back, and drawing batches."""
