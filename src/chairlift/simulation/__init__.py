"""Simulations: recorded traffic through the core, without a model and in no real time.

Nothing here imports torch or reads a clock.
"""
