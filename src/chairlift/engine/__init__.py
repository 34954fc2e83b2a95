"""The loop that drives core: plan a step, run it, apply its results.

The engine sees an executor and a clock through protocols, so the same loop serves, simulates and is tested.
"""
