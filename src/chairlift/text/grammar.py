"""Grammars: compiles what an answer must match, and computes the masks of allowed tokens, with llguidance.

llguidance is imported on first use: all else works without it.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from chairlift.core.constraint import Constraint, Masker, Masks
from chairlift.core.errors import RequestError
from chairlift.core.step import Bits
from chairlift.core.structured import Structured
from chairlift.core.values import one_line
from chairlift.text.json_schema import check_parts, options_of, prepare, where

if TYPE_CHECKING:
    import llguidance
    import numpy as np

    from chairlift.text.tokenizer import Tokenizer

_CACHED_CHARACTERS = 4 << 20  # of compiled grammars' sources
_CACHED = 256  # compiled grammars, copies included: one takes 0.1 to 10 MiB
_MOST_THREADS = 16
_BUFFERS = 4  # arrays of masks: an engine has at most two steps in flight
_ADVANCED_TOGETHER, _ADVANCED_ON = 16, 4  # grammars and threads from which on waking threads pays
_WALKS, _STEPS = 3, 5  # answers that a new grammar is tried out with, and tokens of each: 5 ms for common schemas
_SLOWEST_MASK = 0.004  # seconds, or as long as six passes over the vocabulary take
_VOCABULARY_PASSES = 6  # masks of common schemas take two at most, and a tenth of one on average
_COPIED_WITHIN = 0.02  # seconds: grammars that take longer to compile are compiled once


def source_of(structured: Structured) -> str:
    """Return the grammar in llguidance's language; it is not checked yet."""
    try:
        return _source_of(structured)
    except ValueError as error:  # of llguidance, such as for a schema of 128 levels
        raise RequestError(f"{structured.what} cannot be used: {one_line(error)}") from None


def _source_of(structured: Structured) -> str:
    matcher = _library().LLMatcher
    kind, source = structured.kind, structured.source
    if kind == "json_object":
        schema = {"type": "object"}
        return str(matcher.grammar_from_json_schema(json.dumps(schema), overrides=options_of(schema)))
    if kind == "json":
        schema = prepare(json.loads(source))
        return str(matcher.grammar_from_json_schema(json.dumps(schema), overrides=options_of(schema)))
    if kind == "regex":
        return str(matcher.grammar_from_regex(source))
    if kind == "choice":
        # One token of the grammar: as alternatives of a rule, 2,000 would be too many.
        return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(each) for each in json.loads(source))
    if kind == "structural_tag":
        return _tags(json.loads(source))
    if structured.is_of_tools:
        return source  # written here, of schemas that are checked
    return _lark(source)


def _lark(source: str) -> str:
    if source.lstrip().startswith("{"):  # llguidance would read it as a list of grammars
        raise RequestError("structured: grammar is JSON: give a grammar in Lark's notation or GBNF, or use json")
    if "::=" not in source:
        check_parts(source)
        return source
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(source))
    except Exception as error:  # the converter has no error class of its own
        raise RequestError(f"structured: grammar cannot be converted from GBNF: {one_line(error)}") from None


def _tags(found: dict[str, Any]) -> str:
    library, tags = _library(), []
    for each in found["structures"]:
        trigger = next((trigger for trigger in found["triggers"] if each["begin"].startswith(trigger)), None)
        if trigger is None:
            raise RequestError(f"structured: structural_tag begins with {each['begin']!r}, which has no trigger")
        schema = prepare(each["schema"])
        schema = {**schema, "x-guidance": options_of(schema)}
        tags.append(library.StructTag(trigger=trigger, begin=each["begin"], grammar=schema, end=each.get("end", "")))
    return str(library.StructTag.to_grammar(tags, assume_special=False))


@lru_cache(maxsize=1)
def grammars_for(tokenizer: Tokenizer) -> Grammars:
    """Return the grammars of a tokenizer, to check them with: masks would be wider than a model's."""
    own = tokenizer.eos_token_id
    return Grammars(tokenizer, tokenizer.vocab_size, [] if own is None else [own])


def call_or_json(calls: str, structured: Structured) -> Structured:
    """Return what matches a grammar of tool calls, or JSON."""
    if structured.kind not in ("json", "json_object"):
        raise RequestError(f"tools cannot be combined with {structured.kind}: use json, or leave one of them out")
    schema = prepare(json.loads(structured.source or '{"type":"object"}'))
    schema = {**schema, "x-guidance": options_of(schema)} if isinstance(schema, dict) else schema
    head, _, rest = calls.partition("\nstart:")
    return Structured(
        "grammar", is_of_tools=True, source=f"{head}\nstart: calls | %json {json.dumps(schema)}\ncalls:{rest}"
    )


class Grammars(Masker):
    """Compiles the grammars of one model, and keeps those used last."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, eos_ids: Sequence[int]) -> None:
        library = _library()
        size = max(vocabulary, tokenizer.vocab_size)  # a tokenizer may have more tokens than the model has logits
        # 0.5 to 2 s, during which no other Python thread runs.
        self._tokens = library.LLTokenizer(tokenizer.backend.to_str(), n_vocab=size, eos_token=list(eos_ids))
        self._limits = library.LLParserLimits(
            initial_lexer_fuel=1_000_000,  # 20 ms
            step_lexer_fuel=60_000,  # 4 ms: the batch waits for a mask
            step_max_items=50_000,
            max_items_in_row=2_000,
            max_lexer_states=20_000,  # 1 to 2 KiB each
            max_grammar_size=500_000,
            verbose_errors=False,
        )
        self._threads: Any = None
        self._buffers: deque[np.ndarray | None] = deque([None] * _BUFFERS)
        self._words = (size + 31) // 32
        self._thread_count = min(_MOST_THREADS, os.cpu_count() or 1)
        self._compiled: OrderedDict[str, Compiled] = OrderedDict()
        self._count = 0  # of compiled copies
        self._turn = 0
        self._characters = 0
        self._lock = threading.Lock()

    def constraint(self, source: str) -> GrammarConstraint:
        """Return the constraint of a grammar, compiled if it is not cached; RequestError if it is invalid."""
        if (known := self.cached(source)) is not None:
            return known
        begun = time.perf_counter()
        compiled = self._compile(source)
        return self._keep(source, compiled, time.perf_counter() - begun)

    def _compile(self, source: str) -> GrammarConstraint:
        matcher = _library().LLMatcher(self._tokens, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise RequestError(f"the grammar cannot be used: {explain(matcher.get_error())}")
        compiled = GrammarConstraint(matcher)
        compiled.mask()  # builds what the first step needs
        return compiled

    def _keep(self, source: str, compiled: GrammarConstraint, seconds: float) -> GrammarConstraint:
        """Cache a copy of a grammar, and drop the grammars used least recently."""
        with self._lock:
            wanted = self._thread_count if seconds < _COPIED_WITHIN else 1
            copies = self._compiled.setdefault(source, Compiled([], wanted)).copies
            compiled.copy = len(copies)
            copies.append(compiled)
            self._count += 1
            self._characters += len(source)
            while (self._count > _CACHED or self._characters > _CACHED_CHARACTERS) and self._compiled:
                oldest, dropped = self._compiled.popitem(last=False)
                self._count -= len(dropped.copies)
                self._characters -= len(oldest) * len(dropped.copies)
        return compiled

    def cached(self, source: str) -> GrammarConstraint | None:
        """Return the constraint of a grammar, from each of its copies in turn, if it has all that are wanted."""
        with self._lock:
            known = self._compiled.get(source)
            if known is None or len(known.copies) < known.wanted:
                return None
            self._compiled.move_to_end(source)
            self._turn += 1
            return known.copies[self._turn % len(known.copies)]

    def check(self, structured: Structured) -> str:
        """Return the grammar's source; RequestError with the reason if it cannot be used."""
        source = source_of(structured)
        if source in self._compiled:
            return source
        try:
            begun = time.perf_counter()
            compiled = self._compile(source)
            took = time.perf_counter() - begun
            # A busy machine makes a mask slow now and then; only a slow grammar has one each time it is compiled.
            if self._slowest_of(compiled) > self._slowest_mask:
                slowest = min(self._slowest_of(self._compile(source)) for _ in range(2))
                if slowest > self._slowest_mask:
                    raise RequestError(
                        f"finding the tokens that may come next takes {1000 * slowest:.1f} ms, and "
                        f"{1000 * self._slowest_mask:.1f} are allowed: use fewer or simpler alternatives"
                    )
            self._keep(source, compiled, took)
        except RequestError as error:
            reason = str(error).removeprefix("the grammar cannot be used: ")
            at = where(json.loads(structured.source), reason) if structured.kind == "json" else ""
            raise RequestError(f"{structured.what} cannot be used: {reason}{at}") from None
        return source

    def _slowest_of(self, constraint: GrammarConstraint) -> float:
        """Return the CPU seconds of the slowest mask in a few random answers: the batch would wait for it."""
        chance, slowest = random.Random(0), 0.0
        for _ in range(_WALKS):
            state = constraint.fork()
            for step in range(_STEPS):
                took = _step(state, chance)
                slowest = max(slowest, took if step else 0.0)
                if slowest > self._slowest_mask:
                    return slowest
                if state.is_complete:
                    break
        return slowest

    @cached_property
    def _slowest_mask(self) -> float:
        """Seconds of CPU time that a mask may take: 4 ms, or some passes over the vocabulary if that is more."""
        times = []
        for letter in "xyz":  # each is a new automaton: the second mask of one takes no time
            state, chance = self._compile(f"start: /[^{letter}]*/").fork(), random.Random(0)
            _step(state, chance)
            times.append(_step(state, chance))
        return max(_SLOWEST_MASK, _VOCABULARY_PASSES * min(times))

    def accept(self, constraints: Sequence[Constraint], tokens: Sequence[int]) -> None:
        """Advance many grammars on several threads without the interpreter's lock."""
        jobs = [
            (constraint, token)
            for constraint, token in zip(constraints, tokens, strict=True)
            if isinstance(constraint, GrammarConstraint)
        ]
        if len(jobs) < _ADVANCED_TOGETHER or self._thread_count < _ADVANCED_ON:
            return
        jobs.sort(key=lambda job: job[0].copy)
        done = self._executor().consume_token_par([(grammar.matcher, token) for grammar, token in jobs])
        for (grammar, token), is_allowed in zip(jobs, done, strict=True):
            grammar.advanced = token, is_allowed

    def masks(self, constraints: Sequence[Constraint]) -> Masks:
        """Compute masks, those of grammars on several threads without the interpreter's lock."""
        found = Masks()
        jobs = []
        for place, constraint in enumerate(constraints):
            if isinstance(grammar := constraint.pending, GrammarConstraint):
                jobs.append((grammar, place))
        if jobs:
            packed = self._buffer(len(constraints))
            jobs.sort(key=lambda job: job[0].copy)  # threads take consecutive jobs
            pairs = [(grammar.matcher, place) for grammar, place in jobs]
            self._executor().unsafe_compute_mask_ptr(pairs, packed.ctypes.data, 4 * self._words, len(constraints))
        for grammar, place in jobs:
            grammar.computed = memoryview(packed[place]).cast("B")
        for constraint in constraints:
            found.add(constraint)
        # Reasoning that may still begin joins its grammar's mask with another one.
        if len(jobs) == len(constraints) and all(found[place] is grammar.computed for grammar, place in jobs):
            found.whole = packed if jobs else None
        for grammar, _ in jobs:
            grammar.computed = None  # its memory is used again
        return found

    def _executor(self) -> Any:
        if self._threads is None:
            self._threads = _library().LLExecutor(self._thread_count)
        return self._threads

    def _buffer(self, rows: int) -> np.ndarray:
        """Return memory for masks, of a few arrays in turn: the device may still read those of the last steps."""
        self._buffers.rotate()
        found = self._buffers[0]
        if found is None or len(found) < rows:
            found = self._buffers[0] = (self.allocate or _allocate)(rows, self._words)
        return found[:rows]


def _step(state: GrammarConstraint, chance: random.Random) -> float:
    """Advance by a random token; return the seconds of CPU time that the mask took."""
    begun = time.thread_time()
    allowed = state.mask()
    took = time.thread_time() - begun
    place = chance.choice([place for place, byte in enumerate(allowed) if byte])
    token = 8 * place + chance.choice([bit for bit in range(8) if allowed[place] >> bit & 1])
    if not state.matcher.consume_token(token):
        raise RequestError(f"the grammar is too complex: {explain(state.matcher.get_error())}")
    state.computed = None
    return took


def _allocate(rows: int, words: int) -> np.ndarray:
    import numpy as np  # a process that only checks grammars does without

    return np.empty((rows, words), np.int32)


class Compiled(NamedTuple):
    """Compilations of one grammar.

    Forks of one compilation share counters that every mask changes: 64 masks of forks take longer on 16 threads than on
    one (2.0 and 1.2 ms; of 16 compilations 0.4 ms). So there is one for each thread.
    """

    copies: list[GrammarConstraint]
    wanted: int


class GrammarConstraint(Constraint):
    """An answer's state in a grammar."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self.matcher = matcher
        self.copy = 0  # which compilation of the grammar this is a fork of
        self.computed: Bits | None = None  # the mask of the present state, if it is known
        self.advanced: tuple[int, bool] | None = None  # a token that it has advanced by already, and whether it may

    @property
    def pending(self) -> GrammarConstraint | None:
        """Itself, if the mask of the present state is not known."""
        return self if self.computed is None else None

    def mask(self) -> Bits:
        """Return the tokens that may come next."""
        if self.computed is None:
            self.computed = self.matcher.compute_bitmask()
        if self.matcher.is_error():
            error = self.matcher.get_error()
            if "NoExtensionBias" in error:  # llguidance's word for an empty mask
                raise RequestError("no token can come next, so that nothing can match")
            raise RequestError(f"the grammar is too complex here: {explain(error)}")
        return self.computed

    def accept(self, token: int) -> None:
        """Advance by a token."""
        self.computed, advanced, self.advanced = None, self.advanced, None
        assert advanced is None or advanced[0] == token, "constraints are advanced by the tokens that they accept"
        if not (self.matcher.consume_token(token) if advanced is None else advanced[1]):
            raise RequestError(f"the grammar does not allow token {token}: {explain(self.matcher.get_error())}")

    def fork(self) -> GrammarConstraint:
        """Return an independent copy."""
        copy = GrammarConstraint(self.matcher.deep_copy())
        copy.copy, copy.computed = self.copy, self.computed
        return copy

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return bool(self.matcher.is_stopped())


def explain(error: str) -> str:
    """Return the first sentence of llguidance's error in one line.

    An error in a JSON schema within a grammar comes with lines of the grammar, which the user has not written.
    """
    if schema_error := error.partition("failed to compile JSON schema: ")[2]:
        error = schema_error.partition("\n")[0]
    return " ".join(error.partition("<state>")[0].split())[:300] or "the parser has stopped"


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise RequestError(
            "structured output needs llguidance, which is not installed: pip install llguidance"
        ) from None
    return llguidance
