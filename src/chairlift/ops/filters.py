"""The sampling filters of a batch, shared by the reference and the kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Filters(NamedTuple):
    """The filters of each row, applied in the order min_p, top_k, top_p."""

    top_k: torch.Tensor  # 0: all
    top_p: torch.Tensor
    min_p: torch.Tensor


# The id that means no token: no logit of the row is above -inf. As an int32 it is 0, a valid id, so that the next step,
# launched before the host has seen it, can read it as a token.
NO_TOKEN = 1 << 32
