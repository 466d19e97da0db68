"""Forward passes: packed (varlen) batches, prefix sharing, tree scoring, log-probs."""
