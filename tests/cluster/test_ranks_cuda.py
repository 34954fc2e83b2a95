"""On a CUDA device: NCCL operations inside captured steps, with the one rank that one GPU can have. `pytest -m gpu`.

Two ranks need two GPUs: NCCL refuses two ranks on one. With two or more GPUs, the last test runs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from on_ranks import answers, llm_on

from chairlift import LLM, SamplingParams
from chairlift.cluster.tensor_parallel.ranks import Ranks
from test_cuda import FAMILIES, prompts
from tiny import make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
TIGHT = {"max_length": 256, "kv_tokens": 256, "step_tokens": 32, "max_sequences": 12, "block_size": 16}


@pytest.fixture(scope="module")
def one() -> Iterator[Ranks]:
    ranks = Ranks(1, torch.device("cuda"))
    yield ranks
    ranks.close()


def test_operations_of_the_group_run_again_in_a_captured_graph(one: Ranks) -> None:
    x = torch.arange(12.0, device="cuda").view(3, 4)
    tokens = torch.tensor([5, 6, 7], device="cuda")
    one.group.sum(x.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        summed = one.group.sum(x * 2)
        gathered = one.group.gather(summed + 1)
        sent = one.group.broadcast(tokens + 1)
    for factor in (1.0, 3.0):
        x.copy_(torch.arange(12.0, device="cuda").view(3, 4) * factor)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(summed, x * 2)
        assert torch.equal(gathered, x * 2 + 1)
        assert sent.tolist() == [6, 7, 8]
    assert one.group.least(41) == 41


@pytest.mark.parametrize(("architecture", "config"), FAMILIES.items(), ids=FAMILIES.keys())
@pytest.mark.parametrize("overlap", [False, True])
def test_one_rank_in_a_group_has_the_tokens_of_none(
    one: Ranks, architecture: str, config: dict[str, Any], overlap: bool, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path, architecture, tokenizer=False, spread_norms=True, **config)
    for settings in ({}, TIGHT):
        wanted = {"device": "cuda", "dtype": "float32", "overlap": overlap, **settings}
        expected = answers(LLM(str(folder), progress=False, **wanted), prompts(), GREEDY)
        with llm_on(one, folder, **wanted) as llm:
            graphs = llm.engine._executor._executor._graphs  # type: ignore[attr-defined]
            assert graphs is not None
            assert {is_greedy for _, _, is_greedy in graphs._captured} == {False}, "tokens are chosen after the graph"
            assert answers(llm, prompts(), GREEDY) == expected


def test_sampling_after_the_captured_step_draws_the_same_tokens(one: Ranks, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, tokenizer=False)
    params = SamplingParams(
        n=2, seed=5, temperature=0.9, top_p=0.95, top_k=50, repetition_penalty=1.1, max_tokens=20, logprobs=2,
        ignore_eos=True, logit_bias={7: 1.5},
    )  # fmt: skip
    wanted = {"device": "cuda", "dtype": "float32", "max_length": 256}
    expected = answers(LLM(str(folder), progress=False, **wanted), prompts(), params)
    with llm_on(one, folder, **wanted) as llm:
        assert answers(llm, prompts(), params) == expected


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("overlap", [False, True])
def test_two_gpus_have_the_tokens_of_one(overlap: bool, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, tokenizer=False, spread_norms=True)
    wanted = {"device": "cuda", "dtype": "float32", "overlap": overlap}
    expected = answers(LLM(str(folder), progress=False, **wanted), prompts(), GREEDY)
    with LLM(str(folder), progress=False, tensor_parallel=2, **wanted) as llm:
        assert answers(llm, prompts(), GREEDY) == expected
