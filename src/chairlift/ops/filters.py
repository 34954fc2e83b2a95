"""The filters of a batch, as data that the reference and the kernels share."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Filters(NamedTuple):
    """What each row keeps of the vocabulary: min_p comes first, then top_k, then top_p."""

    top_k: torch.Tensor  # 0: all
    top_p: torch.Tensor
    min_p: torch.Tensor


# The id that stands for no token: no logit of the row is above -inf. As an int32 it is 0, so that a row of tokens which
# holds it can still be read by a step that is launched before the host has seen it.
NOTHING = 1 << 32
