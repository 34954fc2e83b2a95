"""Quality: how near our answers are to transformers' own, and what a smaller KV cache costs.

It compares whole engines on the same weights and the same prompts.
"""
