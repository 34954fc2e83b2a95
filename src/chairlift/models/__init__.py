"""Decoder families, checkpoints on disk, and how checkpoints are loaded.

Models take tokens, positions and KV blocks and know nothing of requests. Weights are read from safetensors or GGUF
only, and no code from a model repository ever runs.
"""
