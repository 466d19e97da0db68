"""A run's trajectories in a browser, turn by turn, and hints written above them.

Reads the run folder, writes one hints file, and knows records only: no models, no torch.
"""
