"""Which sampled tokens of a check of drafts are results."""

from __future__ import annotations

import pytest

from chairlift.core.step import Step
from chairlift.execution.checks import checks_of
from chairlift.ops.filters import NO_TOKEN


@pytest.mark.parametrize(
    ("sampled", "kept", "counts"),
    [
        ([5, 6, 7, 1], [0, 1, 2, 3], [3, 1]),
        ([5, 9, 7, 1], [0, 1, 3], [2, 1]),
        ([5, 6, NO_TOKEN, 1], [0, 1, 3], [2, 1]),
        ([5, NO_TOKEN, 7, 1], [0, 3], [1, 1]),
        ([NO_TOKEN, 6, 7, NO_TOKEN], [0, 3], [1, 1]),
    ],
    ids=["all accepted", "one rejected", "no token behind both", "no token behind one", "no token at all"],
)
def test_a_token_that_cannot_be_chosen_is_no_result_behind_accepted_drafts(
    sampled: list[int], kept: list[int], counts: list[int]
) -> None:
    step = Step(sample_rows=[0, 1], sampled_at=[2, 3], drafts=[(0, [5, 6])])
    assert checks_of(step)[1].accepted(sampled, None, 0.0) == (kept, counts)
