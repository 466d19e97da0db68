"""Estimates of a run before it starts: parameters, FLOPs, GPU memory, hours and money."""
