"""Sampling and scoring: what a rollout and a teacher need of a model."""
