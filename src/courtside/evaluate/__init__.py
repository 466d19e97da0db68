"""Held-out tasks, answered, graded, with intervals."""
