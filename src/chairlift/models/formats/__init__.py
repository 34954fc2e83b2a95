"""Formats of quantized matrices, one file each: how they are stored, and the weights made of them."""
