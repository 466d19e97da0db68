"""A world of everyday requests and real tools, whose names differ from episode to episode."""
