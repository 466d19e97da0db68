"""Readers: trajectories in, hints out."""
