"""One file per command of the command line. A command reads flags and prints; the work is done in other packages.

Nothing here may import torch before a command runs: help and usage errors must print at once.
"""
