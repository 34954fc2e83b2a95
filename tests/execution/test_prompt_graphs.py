"""The sizes that steps with prompts are filled up to; the recording itself is tested on a GPU."""

from __future__ import annotations

import pytest

from chairlift.execution.graphs import recorded_size


@pytest.mark.parametrize(
    ("step_tokens", "tokens", "size"),
    [
        (8192, 1, 32),
        (8192, 32, 32),
        (8192, 33, 64),
        (8192, 2048, 2048),
        (8192, 2049, None),  # the GPU has more to do than the host
        (8192, 8192, 8192),
        (100, 97, 100),
        (12, 5, 12),
    ],
)
def test_a_step_runs_as_the_next_larger_size_if_it_is_small_or_full(
    step_tokens: int, tokens: int, size: int | None
) -> None:
    assert recorded_size(tokens, step_tokens) == size
