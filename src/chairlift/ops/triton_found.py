"""Whether Triton is here: it comes with torch's GPU build, and nothing but a GPU needs it."""

from importlib.util import find_spec

HAS_TRITON = find_spec("triton") is not None
