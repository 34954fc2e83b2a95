"""How a model is divided over ranks: the sizes of one rank, and the part of each tensor that it reads.

Queries, keys, values and the inner columns of the MLP are split by heads and columns. With more ranks than KV heads,
each KV head is repeated on several ranks. What is left whole: norms, biases after a sum, rotary tables.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from chairlift.core.errors import SettingsError
from chairlift.models.config import ModelConfig
from chairlift.models.cut import Cut

if TYPE_CHECKING:
    from chairlift.models.building import Parts


def divides(config: ModelConfig, ranks: int) -> bool:
    """Whether a model can be divided over so many ranks."""
    repeats = ranks % config.kv_heads == 0
    return not (config.heads % ranks or config.inner_size % ranks) and (config.kv_heads % ranks == 0 or repeats)


def of_one_rank(config: ModelConfig, ranks: int) -> ModelConfig:
    """Return the config with the heads and the inner size of one rank; SettingsError if they do not divide."""
    if not divides(config, ranks):
        fitting = [str(count) for count in range(1, config.heads + 1) if divides(config, count)]
        some = f"{', '.join(fitting[:-1])} or {fitting[-1]}" if len(fitting) > 1 else fitting[0]
        raise SettingsError(
            f"tensor_parallel is {ranks}, which does not divide {config.heads} heads over {config.kv_heads} KV heads "
            f"and {config.inner_size:,} MLP columns: use {some}"
        )
    kv_heads = max(1, config.kv_heads // ranks)
    return replace(config, heads=config.heads // ranks, kv_heads=kv_heads, inner_size=config.inner_size // ranks)


def rows_of_rank(own: Parts, whole: Parts, rank: int, ranks: int) -> Cut:
    """Return the rows of each projection in a matrix that a rank has; a projection with fewer parts is repeated.

    >>> rows_of_rank((32, 16), (128, 32), rank=3, ranks=4)  # 4 parts of 32 rows, then 2 of 16 rows
    Cut(dimension=0, ranges=((96, 128), (144, 160)))
    """
    begin, ranges = 0, []
    for size, total in zip(_listed(own), _listed(whole), strict=True):
        first = begin + rank * (total // size) // ranks * size
        ranges.append((first, first + size))
        begin += total
    return Cut(0, tuple(ranges))


def columns_of_rank(own: int, rank: int) -> Cut:
    """Return the columns of a matrix that a rank has."""
    return Cut(1, ((rank * own, (rank + 1) * own),))


def _listed(parts: Parts) -> tuple[int, ...]:
    return (parts,) if isinstance(parts, int) else parts
