"""A web page to read a run's trajectories and write hints for their turns.

Reads the run folder and writes one hints file; without models and torch.
"""
