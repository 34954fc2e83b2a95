"""Threads of the CPU kernels: results do not depend on their number, and compiled kernels are cached soundly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from chairlift import LLM, SamplingParams


def test_answers_do_not_depend_on_the_number_of_threads(tiny_model: Path) -> None:
    prompts = [[5, 6, 7, 8] * 9, [9, 10], [11] * 30]
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=20, ignore_eos=True, logprobs=2)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append([each.outputs[0] for each in LLM(str(tiny_model), progress=False).generate(prompts, params)])
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


@pytest.mark.long
def test_kernels_from_the_cache_give_the_same_tokens_for_every_kv_dtype(tiny_model: Path, tmp_path: Path) -> None:
    """Kernels of one dtype are cached beside those of another, in whatever order they were compiled."""
    code = (
        "import sys; from chairlift import LLM, SamplingParams; "
        "llm = LLM(sys.argv[1], progress=False, kv_dtype=sys.argv[2], max_length=64); "
        "params = SamplingParams(temperature=0, max_tokens=8); "
        "print(llm.generate([[5, 6, 7]], params, progress=False)[0].outputs[0].token_ids)"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}

    def tokens(kv_dtype: str) -> str:
        command = [sys.executable, "-c", code, str(tiny_model), kv_dtype]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=600).stdout

    first = [tokens(each) for each in ("auto", "fp8", "int8")]
    assert [tokens(each) for each in ("auto", "fp8", "int8")] == first
