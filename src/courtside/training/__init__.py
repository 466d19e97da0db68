"""The model that learns: weights, one optimiser step, checkpoints. It knows no algorithm."""
