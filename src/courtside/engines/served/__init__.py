"""Engines behind HTTP: vLLM servers that take and give token ids.

`pool` sends requests to `replicas`, `routes` knows vLLM's two protocols, `probe` asks what the
servers can do, `engine` samples and scores, `vocabulary` compares tokenizers. `adapters` brings the
student's LoRA adapter to the servers of a `student`, and `weight_check` tells whether it arrived.
"""
