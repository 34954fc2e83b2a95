"""Measured costs: a machine's rates, a model's step times, the host's time per step, and the physical lower bound.

This package measures models, ops and core and imports no executor: execution/ uses it to build an engine.
"""
