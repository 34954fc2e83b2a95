"""Quality: agreement with transformers in 16 bits, and accuracy with an 8-bit KV cache.

Whole engines are compared on the same weights and prompts.
"""
