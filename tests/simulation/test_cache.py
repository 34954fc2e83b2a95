"""The simulation of the prefix cache: hits by hand, the optimum as an upper bound, and invalid traces."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.commands.bench_cache import cache as bench_cache
from chairlift.core.errors import ChairliftError
from chairlift.simulation.cache import (
    Trace,
    engine_hits,
    hits_of,
    infinite,
    make_trace,
    optimum,
    read_paths,
    run,
    sizes_of,
    summarize,
    trace_table,
    work,
)
from chairlift.simulation.eviction import LRU, RULES, Clairvoyant, Eviction, UsualGap

A, B, C, D = [1], [2], [3], [4]  # prompts of one block each

# A digit is a token and a block; equal digits after different prefixes are different blocks.
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=5)


def traces(most: int) -> st.SearchStrategy[Trace]:
    return st.lists(prompts, min_size=1, max_size=most).map(lambda requests: make_trace("drawn", requests))


# ---- by hand


def test_equal_ids_are_the_same_block_only_after_equal_prefixes() -> None:
    trace = make_trace("by hand", [[1, 2], [1, 2, 3], [2]])
    assert trace.paths == [[0, 1], [0, 1, 2], [3]]
    assert (trace.blocks, trace.distinct, trace.longest) == (6, 4, 3)


def test_an_unlimited_cache_misses_only_new_blocks() -> None:
    trace = make_trace("by hand", [[1, 2], [1, 2, 3], [4], [1, 2, 3]])
    assert infinite(trace) == 2 + 3
    assert engine_hits(trace, trace.distinct) == optimum(trace, trace.distinct) == 5


def test_lru_evicts_the_next_needed_block_and_the_optimum_does_not() -> None:
    # Three cyclic requests in a cache of two: LRU always evicts the next one. The optimum hits A, then B, ...
    trace = make_trace("by hand", [A, B, C, A, B, C])
    assert engine_hits(trace, 2) == 0
    assert optimum(trace, 2) == 2
    assert infinite(trace) == 3


def test_the_end_of_a_prompt_is_evicted_before_its_beginning() -> None:
    # [1, 2, 3] fills the cache; 9 evicts only the 3, so that 1 and 2 are hits.
    trace = make_trace("by hand", [[1, 2, 3], [9], [1, 2]])
    assert engine_hits(trace, 3) == optimum(trace, 3) == 2


def test_a_block_with_more_uses_is_kept_longer() -> None:
    # A is used every third time, every other block once: LRU has evicted A each time.
    requests = [A if number % 3 == 0 else [number + 10] for number in range(300)]
    trace = make_trace("by hand", requests)
    assert engine_hits(trace, 2) == 0
    assert hits_of(trace, 2, UsualGap(2)) > 90
    assert optimum(trace, 2) == infinite(trace) == 99


# ---- the optimum


def brute_force(trace: Trace, size: int) -> int:
    """Return the most hits over all choices of evicted blocks, leaves or not; only a whole prefix is a hit."""

    @cache
    def most(number: int, cached: frozenset[int]) -> int:
        if number == len(trace.paths):
            return 0
        path = trace.paths[number]
        found = next((place for place, block in enumerate(path) if block not in cached), len(path))
        others = sorted(cached - set(path))
        stay = min(len(others), size - len(path))
        return found + max(most(number + 1, frozenset({*path, *kept})) for kept in combinations(others, stay))

    return most(0, frozenset())


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=8), st.integers(2, 3))
@settings(max_examples=150, deadline=None)
def test_the_optimum_equals_a_brute_force_search(requests: list[list[int]], size: int) -> None:
    trace = make_trace("drawn", [request[:size] for request in requests])
    assert optimum(trace, size) == brute_force(trace, size)


@given(traces(40), st.integers(5, 12))
@settings(max_examples=100, deadline=None)
def test_no_rule_beats_the_optimum_nor_the_optimum_an_unlimited_cache(trace: Trace, size: int) -> None:
    best = optimum(trace, size)
    assert best <= infinite(trace)
    assert engine_hits(trace, size) <= best
    for name, rule in RULES.items():
        assert hits_of(trace, size, rule(size)) <= best, name


# ---- the rules


class Checked:
    """Checks each eviction of a rule: the block must be unreferenced, and a leaf."""

    def __init__(self, rule: Eviction, trace: Trace) -> None:
        self.rule = rule
        self.parents = {child: parent for path in trace.paths for parent, child in pairwise(path)}
        self.cached: set[int] = set()
        self.idle: set[int] = set()

    def keep(self, block: int, content: int) -> None:
        self.cached.add(block)
        self.rule.keep(block, content)

    def use(self, blocks: Sequence[int]) -> None:
        self.rule.use(blocks)

    def add(self, block: int) -> None:
        self.idle.add(block)
        self.rule.add(block)

    def remove(self, block: int) -> None:
        self.idle.remove(block)
        self.rule.remove(block)

    def pop(self) -> int:
        block = self.rule.pop()
        self.idle.remove(block)
        self.cached.remove(block)
        assert all(self.parents.get(other) != block for other in self.cached), "only a leaf may be evicted"
        return block


@given(traces(60), st.integers(5, 12))
@settings(max_examples=60, deadline=None)
def test_every_rule_evicts_unreferenced_leaves(trace: Trace, size: int) -> None:
    for rule in RULES.values():
        hits_of(trace, size, Checked(rule(size), trace))


@given(traces(40), st.integers(5, 12))
@settings(max_examples=60, deadline=None)
def test_the_simulated_lru_is_the_engines(trace: Trace, size: int) -> None:
    assert hits_of(trace, size, LRU(size)) == engine_hits(trace, size)


def test_a_referenced_block_ranks_no_lower_than_its_child() -> None:
    rule = UsualGap(8)
    for block in range(4):
        rule.keep(block, block)
    for _ in range(9):
        rule.use([0, 1])  # a sequence uses 0 and 1 again while another references 0
    rule.add(1)
    rule.use([0, 2])
    rule.add(2)
    rule.add(0)
    assert [rule.pop(), rule.pop(), rule.pop()] in ([2, 1, 0], [1, 2, 0])


def test_stale_entries_do_not_pile_up() -> None:
    rule = Clairvoyant([[1.0]])
    rule.keep(0, 0)
    rule.use([0])
    for _ in range(5000):
        rule.add(0)
        rule.remove(0)
    assert len(rule._heap) < 2000


# ---- files


def written(folder: Path, *lines: object) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def line(at: object, ids: object) -> dict[str, object]:
    return {"timestamp": at, "input_length": 600, "output_length": 7, "hash_ids": ids}


def test_a_trace_is_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    trace = read_paths(written(tmp_path, line(3000, [0, 5]), "", line(0, [0, 1]), line(3000, [0, 1, 2])))
    assert trace.paths == [[0, 1], [0, 2], [0, 1, 3]]
    assert trace.name == "trace.jsonl"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", r"line 2, is not a valid request: it is not JSON \(.*\); each line must be as"),
        ([1], "line 2, is not a valid request: it is not an object; each line must be as"),
        ({"timestamp": 1}, "line 2, is not a valid request: it has no hash_ids"),
        ({"hash_ids": [1]}, "line 2, is not a valid request: it has no timestamp"),
        (line("noon", [1]), 'line 2, is not a valid request: its timestamp is "noon", which is not a number'),
        ('{"timestamp": NaN, "hash_ids": []}', "its timestamp is NaN, which is not a number"),
        (line(1, 7), "its hash_ids are 7, which is not a list"),
        (line(1, [1, "x"]), 'its hash_ids hold "x", which is not a whole number'),
        (line(1, [1, 2.5]), "its hash_ids hold 2.5, which is not a whole number"),
        (line(1, [1, None]), "its hash_ids hold null, which is not a whole number"),
        (line(1, [1, 2, 1]), "its hash_ids have a duplicate"),
        (line(10**400, [1]), "line 2, is not a valid request"),
        ("[" * 100_000, "line 2, is not a valid request"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path: Path, bad: object, message: str) -> None:
    with pytest.raises(ChairliftError, match=message):
        read_paths(written(tmp_path, line(0, [0]), bad))


def test_a_file_that_is_not_a_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ChairliftError, match=r"nowhere\.jsonl cannot be read: No such file"):
        read_paths(tmp_path / "nowhere.jsonl")
    with pytest.raises(ChairliftError, match="cannot be read: Is a directory"):
        read_paths(tmp_path)
    with pytest.raises(ChairliftError, match="holds no request with a block"):
        read_paths(written(tmp_path, line(0, [])))
    (tmp_path / "picture").write_bytes(b"\x89PNG\xff")
    with pytest.raises(ChairliftError, match="it is not text in UTF-8; each line must be as"):
        read_paths(tmp_path / "picture")


# ---- all of it


def chats(count: int = 60) -> Trace:
    """Return interleaved chats with a common system prompt."""
    return make_trace("chats", [[0, *(100 * (n % 7) + turn for turn in range(1 + n // 7))] for n in range(count)])


def test_every_rule_runs_in_every_size_and_progress_reaches_the_end() -> None:
    trace, told = chats(), list[int]()
    sizes = sizes_of(trace, (0.01, 0.5, 2))
    assert sizes[0] == trace.longest and sizes == sorted(set(sizes))
    rows = run(trace, sizes, lambda text: None, told.append)
    assert sum(told) == work(trace, sizes)
    assert [set(row.hits) for row in rows] == [{"LRU", *RULES}] * len(sizes)
    assert {*rows[-1].hits.values(), rows[-1].optimum} == {infinite(trace)}, (
        "a cache of all blocks misses only new ones"
    )


def test_the_report_has_a_column_for_each_size_and_a_row_for_each_rule() -> None:
    trace = chats()
    rows = run(trace, sizes_of(trace, (0.1, 0.5)), lambda text: None, lambda count: None)
    summary = json.loads(json.dumps(summarize(trace, rows)))
    assert summary["infinite"] == infinite(trace)
    shown = trace_table(summary)
    assert shown.row_count == 2 + len(RULES) and len(shown.columns) == 1 + len(rows)


def test_the_picture_is_drawn_from_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from chairlift.bench.plots import cache_hits
    from chairlift.report.drawing import draw

    trace = chats()
    summary = summarize(trace, run(trace, sizes_of(trace), lambda text: None, lambda count: None))
    for name in ("found.svg", "found.png"):
        assert draw(tmp_path / name, cache_hits, summary)
        assert (tmp_path / name).stat().st_size > 5000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plot": Path("found.svg")}, "--plot draws the hit rate on a trace: add --trace FILE"),
        (
            {"trace": Path("t"), "plot": Path("found.txt")},
            "found.txt is not a picture: use a name that ends in .svg or .png",
        ),
        ({"json_file": Path("no/folder.json")}, "no/folder.json cannot be written: there is no such folder"),
    ],
)
def test_an_unwritable_file_is_an_error_before_anything_runs(options: dict[str, Path], message: str) -> None:
    with pytest.raises(ChairliftError, match=message):
        bench_cache(**options)


def test_the_command_s_error_is_one_line(tmp_path: Path) -> None:
    file = written(tmp_path, line(0, [0]), line(1, "x"))
    asked = [sys.executable, "-m", "chairlift", "bench", "cache", "--trace", str(file)]
    answer = subprocess.run(asked, capture_output=True, text=True)
    assert answer.returncode == 1
    assert answer.stderr.startswith(f"error: {file}, line 2, is not a valid request: its hash_ids are")
    assert answer.stderr.count("\n") == 1
