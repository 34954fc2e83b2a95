"""Greedy answers of two ways to compute that round differently may differ where two tokens are about as likely."""

from __future__ import annotations

from dataclasses import replace

from chairlift import LLM, SamplingParams


def ties(
    one: LLM, prompts: list[list[int]], params: SamplingParams, got: list[list[list[int]]], tie: float
) -> list[str]:
    """Check that `got` are the greedy answers of an LLM; return the ties that fell the other way, with their margins.

    `tie` is the largest difference of log-probabilities that is one.
    """
    scored = replace(params, logprobs=5)
    found = []
    for number, (result, own) in enumerate(zip(one.generate(prompts, scored), got, strict=True)):
        expected, tokens = list(result.outputs[0].token_ids), own[0]
        if tokens == expected:
            continue
        place = next(at for at, pair in enumerate(zip(tokens, expected, strict=True)) if pair[0] != pair[1])
        entries = result.outputs[0].logprobs
        assert entries is not None
        scores = {token: entry.logprob for token, entry in entries[place].items()}
        margin = scores[expected[place]] - scores.get(tokens[place], float("-inf"))
        assert margin < tie, f"prompt {number}, token {place}: {tokens[place]} for {expected[place]} by {margin:.2g}"
        found.append(f"prompt {number}, token {place}: margin {margin:.2g}")
    return found
