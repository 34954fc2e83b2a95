"""Generators: endless requests in the order of their send times, drawn one by one as lengths and block ids.

A specification is a generator with its options, or several with weights: "chats:turns=8,think=20", "chats*3+groups".
The requests of several have the generator's name as their tenant. Prompts that begin with equal block ids begin with
equal tokens, so a prefix cache finds in them what it would find in real traffic.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from heapq import heappop, heappush, merge

from chairlift.core.errors import ChairliftError
from chairlift.traffic.query import Query
from chairlift.traffic.workloads import Lengths

BLOCK_TOKENS = 64
_ANSWER_TOKENS_A_SECOND = 50.0  # of a chat's answer: its reader waits for its end before thinking
_BLOCKS = 1 << 10  # of the longest conversation or prefix that is seen as shared
Times = Callable[[float, int], Iterator[float]]  # send times at a share of the rate, with a seed
Generator = Iterator[Query]


def uniform(prompt: Lengths, output: Lengths, times: Times, seed: int) -> Generator:
    """Draw lengths uniformly between low and high."""
    r = random.Random(seed)
    for at in times(1.0, seed):
        yield Query(prompt.uniform(r), output.uniform(r), at)


def lognormal(prompt: Lengths, output: Lengths, times: Times, seed: int) -> Generator:
    """Draw many short and a few long requests."""
    r = random.Random(seed)
    for at in times(1.0, seed):
        yield Query(prompt.lognormal(r), output.lognormal(r), at)


def groups(
    prompt: Lengths, output: Lengths, times: Times, seed: int, *, count: float = 16, shared: float = 1024
) -> Generator:
    """Draw requests of `count` applications, each with a system prompt of `shared` tokens before every prompt."""
    r = random.Random(seed)
    for at in times(1.0, seed):
        blocks = _blocks(seed, r.randrange(max(1, int(count))), int(shared))
        own, answer = prompt.lognormal(r), output.lognormal(r)
        yield Query(int(shared) + own, answer, at, blocks=blocks, block_tokens=BLOCK_TOKENS)


def chats(
    prompt: Lengths,
    output: Lengths,
    times: Times,
    seed: int,
    *,
    turns: float = 5,
    think: float = 20,
    system: float = 256,
) -> Generator:
    """Draw conversations of `turns` requests on average, each with the whole conversation before it as its prompt.

    A message follows `think` seconds on average after the answer before it. All begin with `system` equal tokens.
    """
    r = random.Random(seed)
    mean_turns = max(1.0, turns)
    head = int(system)
    waiting: list[tuple[float, int, int]] = []  # time of a message, its conversation, tokens before it

    def following(before: float) -> Generator:
        while waiting and waiting[0][0] <= before:
            at, number, known = heappop(waiting)
            length, answer = known + prompt.lognormal(r), output.lognormal(r)
            blocks = _blocks(seed, 0, head)
            blocks += _blocks(seed, number, length)[len(blocks) :]
            yield Query(length, answer, at, blocks=blocks, block_tokens=BLOCK_TOKENS)
            if r.random() >= 1 / mean_turns:
                later = answer / _ANSWER_TOKENS_A_SECOND + (r.expovariate(1 / think) if think > 0 else 0.0)
                heappush(waiting, (at + later, number, length + answer))

    for begun, start in enumerate(times(1 / mean_turns, seed), 1):
        heappush(waiting, (start, begun, head))
        yield from following(start)
    yield from following(math.inf)


GENERATORS: dict[str, Callable[..., Generator]] = {
    "uniform": uniform,
    "lognormal": lognormal,
    "groups": groups,
    "chats": chats,
}
_OPTIONS = {"groups": ("count", "shared"), "chats": ("turns", "think", "system")}


def is_generator(text: str) -> bool:
    """Return whether a workload is one of these generators or a mix of them.

    >>> is_generator("chats:turns=3*2+uniform"), is_generator("uniform256"), is_generator("chats.jsonl")
    (True, False, False)
    """
    return all(_name_of(part) in GENERATORS for part in text.split("+"))


def generate(text: str, prompt: Lengths, output: Lengths, times: Times, seed: int = 0) -> Generator:
    """Return the requests of a specification."""
    parts = [_read(part) for part in text.split("+")]
    total = sum(weight for *_, weight in parts)

    def times_of(share: float) -> Times:
        return lambda rate, own: times(rate * share, own)

    made = []
    for number, (name, options, weight) in enumerate(parts):
        own = seed + 1000 * number
        found = GENERATORS[name](prompt, output, times_of(weight / total), own, **options)
        made.append(_labelled(found, name if len(parts) > 1 else ""))
    return merge(*made, key=lambda query: query.at)


def _labelled(queries: Generator, tenant: str) -> Generator:
    return (replace(query, tenant=tenant, kind=tenant) for query in queries) if tenant else queries


def _name_of(part: str) -> str:
    return part.partition("*")[0].partition(":")[0].strip()


def _read(part: str) -> tuple[str, dict[str, float], float]:
    """Read one generator: its name, options and weight."""
    text, _, weight = part.partition("*")
    name, _, given = text.partition(":")
    known = _OPTIONS.get(name.strip(), ())
    try:
        pairs = dict(each.split("=", 1) for each in given.split(",") if each)
        options, share = {key.strip(): float(value) for key, value in pairs.items()}, float(weight or 1)
    except ValueError:
        options, share = {"": 0.0}, 1.0  # refused below
    wrong = [key for key, value in options.items() if key not in known or not 0 <= value < 1e9]
    if wrong or not 0 < share < 1e9:
        choice = f"{name}:{','.join(f'{key}=NUMBER' for key in known)}" if known else name
        raise ChairliftError(f"{part!r} is not a workload: use {choice}, and * with a weight in a mix such as a*3+b")
    return name.strip(), options, share


def _blocks(seed: int, prefix: int, tokens: int) -> list[int]:
    """Return ids for the whole blocks of the first `tokens` of a conversation or a prefix."""
    first = (seed * 99_991 + prefix) * _BLOCKS
    return list(range(first, first + min(tokens // BLOCK_TOKENS, _BLOCKS)))
