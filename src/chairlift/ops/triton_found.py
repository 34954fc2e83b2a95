"""Whether Triton is installed: it is part of torch's GPU build, and only GPUs need it."""

from importlib.util import find_spec

HAS_TRITON = find_spec("triton") is not None
