"""The model that learns: weights, one optimizer step, checkpoints. It knows no algorithm."""
