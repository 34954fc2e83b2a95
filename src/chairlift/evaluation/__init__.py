"""Quality: how near our answers are to transformers' own, and what a smaller KV cache costs.

The models are real, and so are the engines that are asked; nothing here is about speed alone.
"""
