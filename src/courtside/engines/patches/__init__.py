"""Other implementations of a model's layers, in place for the length of a `with`."""
