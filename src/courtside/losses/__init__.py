"""Losses: functions of tensors, never of recipes, models or files; only the student gets gradient.

Where a token's loss is computed in a default step: `training/head.py` groups the positions of a
micro-batch and calls `fused/linear_divergence.py`, which makes logits a chunk at a time; the loss
and its gradient are in `fused/torch_backend.py` (CPU) and `fused/kernels.py` (GPU). Read
`divergences/` for what is minimized, `full_vocabulary.py`, `top_k.py` and `policy_gradient.py` for
the same losses as plain functions of log-probabilities.
"""
