"""A lost device ends the engine; any other error of a step ends the requests of that step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift import LLM, SamplingParams
from chairlift.core.errors import ChairliftError, EngineFault
from chairlift.models.decoder import Decoder


def test_a_lost_device_stops_the_engine_with_an_error(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(tiny_model), progress=False)
    params = SamplingParams(temperature=0, max_tokens=4)
    assert llm.generate([[5, 6, 7]], params)

    def forward(*_args: Any, **_more: Any) -> torch.Tensor:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as broken:
        broken.setattr(Decoder, "forward", forward)
        with pytest.raises(ChairliftError, match="illegal memory access"):
            llm.generate([[5, 6, 7]], params)
    with pytest.raises(EngineFault, match="the engine has stopped"):
        llm.generate([[5, 6, 7]], params)


def test_a_request_that_a_step_cannot_compute_does_not_stop_the_engine(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(tiny_model), progress=False)
    params = SamplingParams(temperature=0, max_tokens=4)

    def forward(*_args: Any, **_more: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as broken:
        broken.setattr(Decoder, "forward", forward)
        with pytest.raises(ChairliftError, match="out of memory"):
            llm.generate([[5, 6, 7]], params)
    assert llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
