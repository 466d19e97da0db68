"""Worlds that answer: a task is the beginning of an episode, and the end state is graded."""
