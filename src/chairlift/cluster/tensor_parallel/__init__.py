"""Tensor parallelism: one model divided over ranks, each a process with a part of every layer.

Rank 0 is the engine's process: it has the scheduler, sends each step as numbers to the other ranks, and chooses all
tokens. With one rank, nothing here runs.
"""
