"""The filters of a batch, as data that the reference and the kernels share."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Filters(NamedTuple):
    """What each row keeps of the vocabulary: min_p comes first, then top_k, then top_p."""

    top_k: torch.Tensor  # 0: all
    top_p: torch.Tensor
    min_p: torch.Tensor
