"""LM head and losses in one pass, a chunk of positions at a time: no logits of a whole batch."""
