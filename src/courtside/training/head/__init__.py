"""The LM head of a training step: logits of a chunk at a time, losses, gradients."""
