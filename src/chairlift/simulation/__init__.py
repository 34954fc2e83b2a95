"""Simulations: recorded traffic through the core's own parts, without a model and without waiting.

Nothing here imports torch or reads a clock.
"""
