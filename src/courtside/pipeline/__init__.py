"""Runs the stages of a pipeline: hand-over of checkpoints, gates, resume."""
