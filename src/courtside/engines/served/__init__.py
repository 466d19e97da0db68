"""Engines behind HTTP: vLLM servers that take and give token ids.

`pool` sends requests to `replicas`, `routes` knows vLLM's two protocols, `probe` asks what the
servers can do, `engine` samples and scores, `vocabulary` compares tokenizers. `weight_sync` keeps
the servers of a `student` at its weights, which travel as `adapters` or `full_weights` through a
`shared_folder`, and `weight_check` tells whether they arrived.
"""
