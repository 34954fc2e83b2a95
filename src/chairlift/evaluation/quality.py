"""A model in its own format, and with 8-bit KV, beside the unquantized one: perplexity, tokens, bytes and speed."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from chairlift.core.errors import ChairliftError
from chairlift.core.params import SamplingParams
from chairlift.core.words import counted
from chairlift.offline.llm import LLM
from chairlift.ops.kv_quant import KV_DTYPES
from chairlift.report.tables import table

TEXT = Path(__file__).with_name("news_from_nowhere.txt")  # docs/quantization.md says where it is from
TEXT_TOKENS = 2000
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 8, 100, 64
BATCH, CONTEXT, DECODED = 16, 1000, 24
LENGTH = 2048  # above the longest sequence of this file


@dataclass(slots=True)
class Measured:
    """The results of one way to store weights, keys and values."""

    name: str
    text: list[int]
    weight_bytes: int
    bytes_per_token: int
    perplexity: float
    likeliest: list[int]  # likeliest next token at each position of the text
    answers: list[list[int]]
    speeds: list[float] = field(default_factory=list)  # decoded tokens per second, by run


def ways(model: str, reference: str | None, settings: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the model and the settings of each way, by name; the first is the unquantized model."""
    dtype, wanted = settings.get("dtype") or "auto", settings.get("kv_dtype") or "auto"
    rounded = settings.get("quantization") or "none"
    own = dtype if rounded == "none" else rounded if dtype == "auto" else f"{rounded} in {dtype}"
    exact = {**settings, "kv_dtype": "auto", "quantization": "none"}
    exact |= {"dtype": "float32"} if reference is None else {}
    found = {"float32" if reference is None else "reference": (reference or model, exact)}
    if own not in found:
        found[own] = model, {**settings, "kv_dtype": "auto"}
    for kv_dtype in KV_DTYPES if wanted == "auto" else [wanted]:
        found[f"{own}, KV {kv_dtype}"] = model, {**settings, "kv_dtype": kv_dtype}
    return found


def measure(
    model: str,
    text: str,
    settings: dict[str, Any],
    repeat: int = 5,
    notice: Callable[[str], None] = lambda _text: None,
    reference: str | None = None,
) -> list[Measured]:
    """Measure the unquantized model, then the settings' dtype with each KV dtype, on the same text and prompts.

    Speed runs are interleaved, so that other load on the machine affects all alike.
    """
    engines, found = [], []
    for name, (path, own) in ways(model, reference, settings).items():
        notice(f"{name}: perplexity and answers")
        room = {"max_length": LENGTH, "kv_tokens": BATCH * (CONTEXT + 2 * DECODED), "max_sequences": BATCH}
        llm = LLM(path, progress=False, **{**room, **own})
        engines.append(llm)
        found.append(_judge(llm, name, text))
    if any(each.text != found[0].text for each in found):
        raise ChairliftError(f"{reference} and {model} split the text into other tokens: use two files of one model")
    for number in range(repeat + 1):
        for llm, each in zip(engines, found, strict=True):
            notice(f"{each.name}: decoding, run {number} of {repeat}")
            speed = _decode(llm)
            if number:  # run 0 fills the prefix cache, so that in later runs all sequences decode together
                each.speeds.append(speed)
    return found


def _judge(llm: LLM, name: str, text: str) -> Measured:
    if llm.tokenizer is None:
        raise ChairliftError(f"{llm.model} has no tokenizer, which the perplexity of a text needs: use another model")
    ids = llm.tokenizer.encode(text)[:TEXT_TOKENS]
    if len(ids) < PROMPTS * PROMPT_TOKENS:
        raise ChairliftError(
            f"the text has {counted(len(ids), 'token')}: give one of {PROMPTS * PROMPT_TOKENS} or more"
        )
    scored = llm.generate([ids], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))[0]
    entries = (scored.prompt_logprobs or [])[1:]
    logprobs = [entry[token].logprob for token, entry in zip(ids[1:], entries, strict=True) if entry]
    likeliest = [token for entry in entries if entry for token, found in entry.items() if found.rank == 1]
    prompts = [ids[start : start + PROMPT_TOKENS] for start in range(0, PROMPTS * PROMPT_TOKENS, PROMPT_TOKENS)]
    greedy = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    answers = [result.outputs[0].token_ids for result in llm.generate(prompts, greedy)]
    perplexity = math.exp(-statistics.fmean(logprobs))
    return Measured(name, ids, llm.weight_bytes, llm.capacity.bytes_per_token, perplexity, likeliest, answers)


def _decode(llm: LLM) -> float:
    """Return the decode speed of a full batch with long contexts, in tokens per second."""
    draw = random.Random(0)
    prompts = [[draw.randrange(llm.config.vocab_size) for _ in range(CONTEXT)] for _ in range(BATCH)]
    results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=DECODED, ignore_eos=True))
    return BATCH / statistics.median(result.metrics.tpot or math.nan for result in results)


def quality_table(found: list[Measured], model: str) -> Table:
    """Return the table, with a column for each way to store weights, keys and values."""
    exact = found[0]
    tokens = PROMPTS * ANSWER_TOKENS
    rows: list[tuple[str, Callable[[Measured], str]]] = [
        ("weights that a step reads", lambda each: f"{each.weight_bytes / 1e6:,.1f} MB"),
        ("bytes of a token's KV", lambda each: f"{each.bytes_per_token:,}"),
        ("tokens in the same memory", lambda each: f"{exact.bytes_per_token / each.bytes_per_token:.2f}x"),
        (f"perplexity, {counted(len(exact.likeliest), 'token')}", lambda each: f"{each.perplexity:.3f}"),
        ("same likeliest next token", lambda each: f"{_share(each.likeliest, exact.likeliest):.1%}"),
        (f"same token in {tokens} decoded greedily", lambda each: f"{_share(_flat(each), _flat(exact)):.1%}"),
    ]
    if exact.speeds:
        rows += [
            (
                f"decoding {counted(BATCH, 'sequence')} at {counted(CONTEXT, 'token')}",
                lambda each: f"{statistics.median(each.speeds):,.1f} tok/s",
            ),
            (
                "ratio, median of runs",
                lambda each: f"{statistics.median(a / b for a, b in zip(each.speeds, exact.speeds, strict=True)):.2f}x",
            ),
        ]
    return table(
        f"{model}: quality beside the unquantized model",
        ("", *(each.name for each in found)),
        [(label, *map(cell, found)) for label, cell in rows],
        is_centered=True,
    )


def _flat(each: Measured) -> list[int]:
    return [token for answer in each.answers for token in answer]


def _share(got: list[int], expected: list[int]) -> float:
    return statistics.fmean(a == b for a, b in zip(got, expected, strict=True))
