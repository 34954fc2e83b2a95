"""Answers of a real model under every schema of the corpus: how many end, and whether each that ends is valid.

    python benchmarks/structured_corpus.py [--every 1] [--tokens 256] [--model M] [--load-format dummy]

The model reads each schema in its prompt and answers under it, greedy and at temperature 1, without speculation and
with n-gram drafts in every step. Answers that end are checked with `jsonschema`; those that reach the last token are
counted. Schemas with keywords that cannot be enforced must be refused with the keyword's path. The exit status is 1 if
an answer that ended is not valid, or a schema was not refused.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from chairlift import LLM, SamplingParams
from chairlift.core.errors import RequestError
from schemas import UNSUPPORTED, Schema, check, corpus

SPECULATION: dict[str, dict[str, Any]] = {"none": {}, "n-gram": {"speculation": "ngram", "fixed_drafts": 3}}
CHOICES: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "temperature 1": {"temperature": 1.0, "seed": 16}}


def answer(llm: LLM, schemas: list[Schema], tokens: int, choice: dict[str, Any]) -> tuple[int, int, list[str]]:
    """Return how many answers ended and were cut off, and what was wrong with those that ended."""
    texts = [json.dumps(schema, ensure_ascii=False) for schema in schemas]
    chats = [
        [{"role": "user", "content": f"Write an example in JSON. It must match this schema: {text}"}] for text in texts
    ]
    params = [SamplingParams(max_tokens=tokens, structured={"json": schema}, **choice) for schema in schemas]
    ended, wrong = 0, []
    for schema, output in zip(schemas, llm.chat(chats, params, use_tqdm=False), strict=True):
        [found] = output.outputs
        if found.error is not None:
            wrong.append(f"{found.error}\n    schema {json.dumps(schema, ensure_ascii=False)}")
        if found.finish_reason != "stop":
            continue
        ended += 1
        try:
            check(found.text, schema)
        except Exception as error:
            said = str(error).partition("\n")[0]
            wrong.append(f"{said}\n    schema {json.dumps(schema, ensure_ascii=False)}\n    answer {found.text}")
    return ended, len(schemas) - ended, wrong


def not_refused(llm: LLM) -> list[str]:
    """Return the schemas that are not refused with the path of their keyword."""
    found = []
    for schema, path in UNSUPPORTED:
        try:
            llm.generate("x", SamplingParams(max_tokens=1, structured={"json": schema}), progress=False)
            found.append(f"{json.dumps(schema)} was not refused")
        except RequestError as error:
            if f"(at {path})" not in str(error):
                found.append(f"{json.dumps(schema)} was refused without {path}: {error}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="take each n-th schema")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer at most")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights, with the model's tokenizer")
    chosen = parser.parse_args()
    schemas, wrong = corpus()[:: chosen.every], []
    print(f"{len(schemas)} of {len(corpus())} schemas, {len(UNSUPPORTED)} that cannot be enforced")
    print("speculation  choice         ended  cut off  valid   drafts accepted  seconds")
    for speculation, settings in SPECULATION.items():
        with LLM(chosen.model, load_format=chosen.load_format, progress=False, **settings) as llm:
            for name, choice in CHOICES.items():
                begun, before = time.monotonic(), accepted(llm)
                ended, cut, found = answer(llm, schemas, chosen.tokens, choice)
                wrong += found
                print(
                    f"{speculation:11}  {name:13}  {ended:5}  {cut:7}  {ended - len(found):5}  "
                    f"{accepted(llm) - before:16}  {time.monotonic() - begun:7.0f}",
                    flush=True,
                )
            if not settings:
                wrong += not_refused(llm)
    print(*wrong, sep="\n")
    sys.exit(bool(wrong))


def accepted(llm: LLM) -> int:
    """Return the number of accepted drafts so far."""
    speculation = llm.engine.scheduler.planner.speculation
    return 0 if speculation is None else sum(speculation.counts.accepted)


if __name__ == "__main__":
    main()
