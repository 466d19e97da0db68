"""LM head and divergence in one pass: no logits of a whole batch exist."""
