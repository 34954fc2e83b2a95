"""One file per command of the command line. They read flags and print; the work is done elsewhere.

Nothing here may import torch before a command runs: help and usage errors must come at once.
"""
