"""How much memory a step takes: gradient checkpointing, the KV budget of a rollout."""
