"""Enough of a runtime to use the weights: greedy generation with a KV cache, chat template, sentence embeddings."""
