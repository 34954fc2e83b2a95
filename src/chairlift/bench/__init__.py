"""Reproducible speed measurements: each returns its numbers, and a command prints them.

Results are medians and ratios from real components; no measured package imports this one. Other engines run in
processes of their own.
"""
