"""The run folder and everything made from it: metrics, costs, console, report, trackers.

Knows records and recipes, never tensors or models. Reading a folder loads no torch.
"""
