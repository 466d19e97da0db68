"""Losses: pure functions of log-probabilities, un-reduced, honest about value and gradient.

They see tensors only, never recipes, models or files. Teachers, references and samplers never get
gradient. Import from the modules: some of them share their name with a function.
"""
