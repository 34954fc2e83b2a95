"""Decoder families, what they are made of on disk, and how that becomes tensors.

Models see tokens, positions and pages; they know nothing of requests. Weights come from safetensors or GGUF only, and
no code from a model repository ever runs.
"""
