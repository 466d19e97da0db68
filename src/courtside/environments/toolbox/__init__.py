"""An environment of everyday requests and real tools, whose names differ between episodes."""
