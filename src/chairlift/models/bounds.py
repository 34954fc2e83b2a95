"""Bounds of a config's counts: above any real model, so that objects per layer or head take megabytes at most."""

MAX_LAYERS = 10_000
MAX_HEADS = 1 << 16
MAX_LENGTH = 1 << 24
