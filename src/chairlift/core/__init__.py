"""The ideas, in pure Python: requests, plans, blocks and the scheduler.

Nothing here imports torch, reads a file or a clock, or knows what a model is; so it can be read by anyone,
simulated, and driven by property tests. A test holds this.
"""
