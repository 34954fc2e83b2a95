"""Chairlift serves large language models with continuous batching on a paged KV cache."""
