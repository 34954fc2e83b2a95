"""What structured output costs: decode steps with none, one and all of the sequences constrained, in turn.

    python benchmarks/structured_cost.py [--model M] [--load-format dummy] [--sequences 64] [--tokens 48]
        [--rounds 5] [--worst]

All answers have the same length. It prints the median time of a decode step for each, as a ratio to unconstrained ones,
the time of a mask per sequence, and the time to compile typical schemas.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from chairlift import LLM, SamplingParams
from chairlift.core.structured import Structured
from chairlift.text.grammar import Grammars, source_of
from schemas import corpus

# Long enough that no answer ends before the step that is timed.
WORST = {
    "type": "array",
    "minItems": 200,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["animal", "plant", "mineral"]},
            "size": {"type": "number", "minimum": 0, "maximum": 1000},
        },
        "required": ["name", "kind", "size"],
        "additionalProperties": False,
    },
}

# Random weights write random text, as no trained model does. Names are chosen from sentences here, so that masks are
# those of ordinary text.
SENTENCES = [
    *("a grey cat that sleeps on the window sill", "a tall oak in the middle of the park", "granite from the quarry"),
    *("an owl, seen only at night", "moss on the north side of the wall", "quartz with a vein of gold"),
    *("the hedgehog under the porch", "a field of barley before the harvest", "salt from an old mine"),
]
TYPICAL = {
    **WORST,
    "items": {
        **WORST["items"],
        "properties": {**WORST["items"]["properties"], "name": {"enum": SENTENCES}},
    },
}


def decode_steps(llm: LLM, schema: dict[str, Any], sequences: int, constrained: int, tokens: int) -> list[float]:
    """Return the seconds of the steps that decode for all sequences and compute nothing else."""
    plain = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=1, seed=1)
    held = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=1, seed=1, structured={"json": schema})
    params = [held if place < constrained else plain for place in range(sequences)]
    times, last = [], time.perf_counter()

    def see(plan: Any, begun: float, seconds: float) -> None:
        nonlocal last
        now = time.perf_counter()
        if plan.tokens == sequences == len(plan.sample_rows):
            times.append(now - last)
        last = now

    llm.engine.on_step = see
    prompts = [f"Number {place}: a list of things as JSON:" for place in range(sequences)]
    llm.generate(prompts, params, progress=False)
    llm.engine.on_step = None
    return times[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights, with the model's tokenizer")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worst", action="store_true", help="random text in strings of bounded length")
    chosen = parser.parse_args()
    llm = LLM(chosen.model, max_sequences=chosen.sequences, load_format=chosen.load_format, progress=False)
    parts = (0, 1, chosen.sequences)
    found: dict[int, list[float]] = {constrained: [] for constrained in parts}
    schema = WORST if chosen.worst else TYPICAL
    decode_steps(llm, schema, chosen.sequences, chosen.sequences, 8)  # compiles the grammar
    for _ in range(chosen.rounds):
        for constrained in parts:
            found[constrained].append(
                statistics.median(decode_steps(llm, schema, chosen.sequences, constrained, chosen.tokens))
            )
    base = statistics.median(found[0])
    for constrained, times in found.items():
        each = [time / free for time, free in zip(times, found[0], strict=True)]
        print(
            f"{constrained:3} of {chosen.sequences} constrained: {1e3 * statistics.median(times):7.2f} ms a step, "
            f"{statistics.median(times) / base:.3f}x (rounds: {', '.join(f'{ratio:.3f}' for ratio in each)})"
        )
    tokenizer = llm.get_tokenizer()
    begun = time.perf_counter()
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id or 0])
    print(f"reading a vocabulary of {tokenizer.vocab_size:,}: {time.perf_counter() - begun:.2f} s")
    time_masks(grammars, tokenizer)
    times = []
    for schema in corpus():
        source = source_of(Structured.of({"json": schema}))
        begun = time.perf_counter()
        grammars.constraint(source)
        times.append(1e3 * (time.perf_counter() - begun))
    times.sort()
    print(f"compiling {len(times)} schemas: median {statistics.median(times):.2f} ms, most {times[-1]:.1f} ms")


def time_masks(grammars: Grammars, tokenizer: Any) -> None:
    """Time the masks along one answer, one by one and for 64 sequences at once."""
    text = (
        '[{"name": "a grey cat", "kind": "animal", "size": 0.4}, {"name": "a tall oak", "kind": "plant", "size": 21},'
    )
    first = grammars.constraint(source_of(Structured.of({"json": WORST})))
    several = [first.fork() for _ in range(64)]
    alone, together = [], []
    for token in tokenizer.encode(text, add_special_tokens=False):
        one = several[0].fork()
        begun = time.perf_counter()
        one.mask()
        alone.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        grammars.masks(several)
        together.append((time.perf_counter() - begun) / len(several))
        for each in several:
            each.accept(token)
    print(
        f"a mask: {1e6 * statistics.mean(alone):.0f} us alone (most {1e6 * max(alone):.0f}), "
        f"{1e6 * statistics.mean(together):.0f} us for each of 64 at once"
    )


if __name__ == "__main__":
    main()
