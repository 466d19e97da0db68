"""Short requests of which six in an episode tempt the student into one of four habits."""
