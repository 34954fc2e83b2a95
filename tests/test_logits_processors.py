"""Logits processors see the real tokens before theirs, whatever else runs; one that fails ends its request alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift import LLM, SamplingParams
from chairlift.core.errors import RequestError
from mostly_long import mostly_long

SETTINGS: dict[str, dict[str, int]] = {
    "roomy": {"kv_tokens": 4096},
    "chunked": {"kv_tokens": 4096, "step_tokens": 16, "max_sequences": 16},
    "tight": {"kv_tokens": 256, "max_sequences": 16},
}
PROMPTS = [[token] * 20 for token in range(5, 13)]


@pytest.fixture(scope="module", params=list(product(SETTINGS, (False, True))), ids=lambda each: f"{each[0]}-{each[1]}")
def llm(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[LLM]:
    name, overlap = request.param
    llm = LLM(str(tiny_model), progress=False, max_length=256, overlap=overlap, **SETTINGS[name])
    yield llm
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.pool.owned == 0


def follow(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Force a token that is a function of all tokens before it: one wrong, missing or late token changes the rest."""
    wanted = (31 * len(output) + 7 * sum(prompt) + 3 * sum(output) + (output[-1] if output else 0)) % 300 + 2
    return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor(wanted), 0.0)


def followed(prompt: list[int], count: int) -> list[int]:
    output: list[int] = []
    for _ in range(count):
        output.append(int(follow(prompt, output, torch.zeros(384)).argmax()))
    return output


def params(*processors: Callable[..., Any], **more: Any) -> SamplingParams:
    return SamplingParams(logits_processors=processors, **{"max_tokens": 30, "ignore_eos": True, **more})


@pytest.mark.parametrize("more", mostly_long([{"seed": 2, "n": 3, "logprobs": 1}, {"temperature": 0}, {"seed": 1}]))
def test_a_processor_sees_every_token_before_its_own(llm: LLM, more: dict[str, Any]) -> None:
    plain = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    others = [[token] * 9 for token in range(20, 24)]
    alone = [llm.generate(prompt, plain)[0].outputs[0].token_ids for prompt in others]
    before = llm.engine.scheduler.counters.preemptions
    choices = [params(follow, **more)] * len(PROMPTS) + [plain] * len(others)
    results = llm.generate([*PROMPTS, *others], choices)
    for prompt, result in zip(PROMPTS, results, strict=False):
        assert [answer.token_ids for answer in result.outputs] == [followed(prompt, 30)] * more.get("n", 1)
    assert [result.outputs[0].token_ids for result in results[len(PROMPTS) :]] == alone, "the others are as without it"
    if llm.settings.cache.kv_tokens == 256:
        assert llm.engine.scheduler.counters.preemptions > before


def test_with_two_arguments_it_gets_the_output_alone_and_may_change_logits_in_place(llm: LLM) -> None:
    seen: list[list[int]] = []

    def ban_even(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(output)
        logits[::2] = -torch.inf
        return logits

    [result] = llm.generate(PROMPTS[0], params(ban_even, temperature=0, max_tokens=8))
    tokens = result.outputs[0].token_ids
    assert all(token % 2 for token in tokens)
    assert seen[: len(tokens)] == [tokens[:count] for count in range(len(tokens))]


def test_several_run_in_order_and_before_the_request_s_own_bias(llm: LLM) -> None:
    def only(*kept: int) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
        def keep(_output: list[int], logits: torch.Tensor) -> torch.Tensor:
            mask = torch.full_like(logits, -torch.inf)
            mask[list(kept)] = 0.0
            return logits + mask

        return keep

    asked = params(only(40, 41, 42), only(41, 42, 43), temperature=0, max_tokens=3, logit_bias={42: 100.0})
    assert llm.generate(PROMPTS[0], asked)[0].outputs[0].token_ids == [42, 42, 42]


def raises(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    if len(output) == 3:
        raise ValueError("no fourth token")
    return logits


BROKEN: dict[str, tuple[Callable[..., Any], str]] = {
    "raises": (raises, "logits processor raises failed: ValueError: no fourth token"),
    "returns nothing": (lambda output, logits: None, "it returned NoneType"),
    "another shape": (lambda output, logits: logits[:5], r"it returned \(5,\), not a tensor of shape \(384,\)"),
    "no token left": (lambda output, logits: logits - torch.inf, "all logits are -inf"),
    "not a number": (lambda output, logits: logits * torch.nan, "it returned NaN"),
}


@pytest.mark.parametrize("count", [4, 9], ids=["in its last token", "on the way"])
@pytest.mark.parametrize(("function", "why"), BROKEN.values(), ids=BROKEN.keys())
def test_one_that_fails_ends_its_own_request(llm: LLM, function: Callable[..., Any], why: str, count: int) -> None:
    plain = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    [expected] = llm.generate(PROMPTS[1], plain)
    broken = params(function, temperature=0, max_tokens=count)
    failed, other = llm.generate(PROMPTS[:2], [broken, plain])
    assert failed.error is not None and failed.outputs[0].finish_reason == "error"
    assert other.outputs[0].token_ids == expected.outputs[0].token_ids
    with pytest.raises(RequestError, match=why):
        llm.generate(PROMPTS[0], broken)
    with pytest.raises(RequestError, match=why):
        list(llm.stream(PROMPTS[0], broken))
    assert not llm.engine.scheduler.has_work


def test_what_cannot_be_called_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="logits_processors holds 5"):
        params(5)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="does not support logits_processors"):
        params(follow, use_beam_search=True, n=2)
