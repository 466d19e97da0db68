"""Environments: a task starts an episode of many turns, whose end state is graded."""
