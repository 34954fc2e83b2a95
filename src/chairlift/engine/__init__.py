"""The loop that drives core: plan, run, take in, again.

The engine knows an executor and a clock only by what they do, so the same loop serves, simulates and is tested.
"""
