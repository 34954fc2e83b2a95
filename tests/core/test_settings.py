"""Settings come from flat names; what is unknown or cannot work is refused by name, before a model is loaded."""

from __future__ import annotations

import re
from typing import Any

import pytest

from chairlift.core.assemble import assemble_scheduler
from chairlift.core.batching import GATES
from chairlift.core.blocks import BlockPool
from chairlift.core.cost import Cost
from chairlift.core.errors import SettingsError
from chairlift.core.limits import Limits
from chairlift.core.policies import POLICIES
from chairlift.core.predictor import PREDICTORS
from chairlift.core.preemption import PREEMPTIONS
from chairlift.core.prefill import PREFILL_MODES
from chairlift.core.request import Request
from chairlift.core.settings import Settings, options

BAD: list[tuple[dict[str, Any], str]] = [
    ({"block_size": 8}, "block_size is 8"),
    ({"block_size": 0}, "block_size is 0"),
    ({"block_size": 24}, "block_size is 24"),
    ({"memory_share": 0.0}, "memory_share is 0.0"),
    ({"memory_share": 1.5}, "memory_share is 1.5"),
    ({"kv_tokens": 0}, "kv_tokens is 0"),
    ({"max_length": 1}, "max_length is 1"),
    ({"max_sequences": 0}, "max_sequences is 0"),
    ({"step_tokens": -1}, "step_tokens is -1"),
    ({"dtype": "int3"}, "dtype is 'int3': use one of auto, float32"),
    ({"load_format": "pickle"}, "load_format is 'pickle'"),
    ({"policy": "lifo"}, "policy is 'lifo': use one of fcfs"),
    ({"batching": "never"}, "batching is 'never'"),
    ({"prefill": "none"}, "prefill is 'none'"),
    ({"preemption": "none"}, "preemption is 'none'"),
    ({"predictor": "stars"}, "predictor is 'stars'"),
    ({"aging": -1.0}, "aging is -1.0"),
    ({"batch_window": float("inf")}, "batch_window is inf"),
    ({"target_tpot": 0.0}, "target_tpot is 0.0"),
    ({"target_tpot": 0.1, "prefill": "whole"}, "target_tpot is 0.1 with whole prompts"),
    ({"host_tokens": -1}, "host_tokens is -1: use 0 or more"),
    ({"host_tokens": 0, "disk_cache": "."}, "host_tokens is 0: leave one of them out"),
    (
        {"max_lenght": 5},
        "there is no setting max_lenght (did you mean max_length?); the settings are aging, batch_window",
    ),
    ({"max_model_len": 5}, "max_model_len is called max_length here"),
    ({"tensor_parallel_size": 2}, "tensor_parallel_size is called tensor_parallel here"),
    ({"tensor_parallel": 0}, "tensor_parallel is 0: use 1 or more, or leave it out"),
    (
        {"pipeline_parallel_size": 2},
        "there is no pipeline_parallel_size here: a model is divided over devices by tensor_parallel alone",
    ),
]


@pytest.mark.parametrize(("values", "message"), BAD, ids=[str(values) for values, _ in BAD])
def test_a_setting_that_cannot_work_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(message)):
        Settings.of(**values)


def test_flat_names_find_their_group() -> None:
    settings = Settings.of(max_length=99, block_size=32, max_sequences=5, overlap=False)
    assert settings.model.max_length == 99
    assert settings.cache.block_size == 32
    assert settings.scheduling.max_sequences == 5
    assert settings.scheduling.overlap is False


def test_none_keeps_the_default() -> None:
    assert Settings.of(block_size=None, policy=None) == Settings() == Settings.of()


def test_a_name_belongs_to_one_group_and_says_when_to_change_it() -> None:
    names = [found.name for _, found in options()]
    assert len(names) == len(set(names))
    assert all(len(found.metadata["help"]) > 20 for _, found in options())


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("policy", POLICIES),
        ("batching", {name: gate for name, gate in GATES.items() if name != "static"}),
        ("prefill", PREFILL_MODES),
        ("preemption", PREEMPTIONS),
        ("predictor", PREDICTORS),
    ],
)
def test_every_entry_of_a_table_can_be_chosen_and_made(name: str, table: dict[str, Any]) -> None:
    (choices,) = [found.metadata["choices"] for _, found in options() if found.name == name]
    assert set(table) <= set(choices)
    limits = Limits(max_sequences=2, step_tokens=66, max_length=64, vocab_size=9)
    for choice in table:
        scheduling = Settings.of(**{name: choice}).scheduling
        assert getattr(scheduling, name) == choice
        made = assemble_scheduler(scheduling, limits, BlockPool(4, 16), BlockPool(4, 16), Cost())
        made.submit(Request("r", [1, 2]))
        assert made.plan(1.0)
        made.check()
