"""Compiling grammars in threads of the engine process."""

from __future__ import annotations

import json
from pathlib import Path

from chairlift.core.structured import Structured
from chairlift.serving.compiling import Compiler
from chairlift.text.grammar import Grammars, source_of
from chairlift.text.tokenizer import Tokenizer


def test_an_engine_that_ends_does_not_compile_the_grammars_that_wait(tiny_model: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny_model)
    compiler = Compiler(lambda: Grammars(tokenizer, tokenizer.vocab_size, [0]))
    compiler.prepare().join()
    schemas = [{"enum": [f"{number}-{place}" for place in range(300)]} for number in range(200)]
    sources = [source_of(Structured("json", json.dumps(schema))) for schema in schemas]
    for number, source in enumerate(sources):
        compiler.start(str(number), source)
    compiler.close()
    compiler._threads.shutdown()  # what the interpreter does when it exits
    assert len(compiler.take()) < len(sources) / 2
