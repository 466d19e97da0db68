"""Chat messages to token ids with exact spans; sampled ids are never re-tokenized."""
