"""Decoding: sessions, continuous batching, KV cache, CUDA graphs, sampler."""
