"""Programmatic dependent launch: a kernel's programs are launched while the previous kernel still runs, and wait there.

Between two kernels of a stream a GPU is idle for about a microsecond, and a decode step of a small model is a chain of
kernels not much longer than that. From compute capability 9 on, a kernel's programs may be launched as soon as all
programs of the previous kernel have been; it must call `wait` before it accesses memory that other kernels use.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@functools.cache
def early() -> dict[str, Any]:
    """Return the launch options of a kernel with the parameter EARLY."""
    able = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if able else {"EARLY": False}


@triton.jit
def wait(EARLY: tl.constexpr):
    """Wait until all previous kernels have finished, and let the next kernel launch.

    Programs without work must call it too: if a kernel ended without waiting, the next one would start too early.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
