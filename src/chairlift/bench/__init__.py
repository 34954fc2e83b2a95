"""Speed that anyone can measure again: each measurement returns its numbers, and a command prints them.

It is told as medians and ratios from real components; nothing here is imported by what it measures. The engines to
compare with are loaded in processes of their own.
"""
