"""The run folder on disk: atomic writes, lock, metrics, trajectories, hints."""
