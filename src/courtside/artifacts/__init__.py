"""Trained students for other programs: portable model folders, model cards, the hub, vLLM."""
