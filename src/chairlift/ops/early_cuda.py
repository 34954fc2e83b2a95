"""Early launch: a kernel's programs are brought up while the one before it still runs, and wait there for its results.

Between two kernels of a stream a GPU is idle for about a microsecond, and a decode step of a small model is a chain of
kernels not much longer than that. From compute capability 9 a kernel may ask for its programs to be placed as soon as
those of the one before have all been; it then must call `wait` before it touches anything that others read or write.
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
    """What to launch a kernel with that has the parameter EARLY."""
    able = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if able else {"EARLY": False}


@triton.jit
def wait(EARLY: tl.constexpr):
    """Until all kernels before have ended, and let the next one be placed.

    Every program must call it, those without work too: a kernel that ends unwaited would make the next one start early.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
