"""The learning methods, one file each: the mathematics as pure functions, then the choreography."""
