"""KV blocks through NIXL, the real package: which connections use it, and what is left when an end is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from test_kv_transfer import BLOCKS, SIZE, address, receiver, sender, until, with_nixl

from chairlift.cluster.kv_transfer import nixl, region
from chairlift.core.prefix_node import packed

__all__ = ["with_nixl"]  # a fixture
pytestmark = pytest.mark.usefixtures("with_nixl")
TOKENS = list(range(10 * SIZE))

RECEIVER = """
import sys, time
from test_kv_transfer import receiver
engine, incoming = receiver(sys.argv[1])
print("ready", flush=True)
while True:
    engine.step()
    time.sleep(0.002)
"""
SENDER = """
import sys, time
from test_kv_transfer import BLOCKS, SIZE, sender
from chairlift.core.prefix_node import packed
engine, outgoing = sender()
print("ready", flush=True)
for number in range(10**9):
    tokens = [number] * (10 * SIZE)
    outgoing.begin(str(number), sys.argv[1], "", packed(tokens))
    outgoing.computed(str(number), list(range(10)), len(tokens))
    outgoing.finish(str(number))
    while not outgoing.take_done():
        time.sleep(0.001)
"""


@contextmanager
def process(script: str, where: str) -> Iterator[subprocess.Popen[bytes]]:
    """The other end, in a process of its own."""
    found = os.pathsep.join(sys.path)
    child = subprocess.Popen(
        [sys.executable, "-c", script, where], env={**os.environ, "PYTHONPATH": found}, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.parametrize("lacking", ["neither", "sender", "receiver"])
def test_nixl_is_used_if_both_ends_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    where = address("tcp", tmp_path)
    (there, _), (_, outgoing) = receiver(where), sender()
    own, asked = region.ways_between, list[str]()

    def ways(given: str, device: torch.device) -> list[str]:
        end = "receiver" if given == "tcp:" else "sender"
        asked.append(end)
        return ["tcp"] if end == lacking else own(given, device)

    monkeypatch.setattr(region, "ways_between", ways)
    outgoing.begin("r", where, "", packed(TOKENS))
    outgoing.computed("r", list(range(10)), len(TOKENS))
    outgoing.finish("r")
    until(lambda: outgoing.take_done(), there)
    assert len(there.found(TOKENS)) == 10 and {*asked} == {"sender", "receiver"}
    assert (outgoing._peers[where]._region.write is not None) == (lacking == "neither")


def test_a_receiver_that_nixl_does_not_reach_gets_its_blocks_over_tcp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    where = address("tcp", tmp_path)
    (there, _), (_, outgoing) = receiver(where), sender()

    def refuse(*_: object) -> None:
        raise nixl.LinkError("there is no route")

    monkeypatch.setattr(nixl.Outlet, "write", refuse)
    outgoing.begin("r", where, "", packed(TOKENS))
    outgoing.computed("r", list(range(10)), len(TOKENS))
    outgoing.finish("r")
    until(lambda: outgoing.take_done(), there)
    assert len(there.found(TOKENS)) == 10
    assert f"KV blocks are sent to {where} over TCP" in caplog.text and "there is no route" in caplog.text


@pytest.mark.long
def test_a_killed_receiver_ends_the_connection_and_the_prompt_goes_to_another_one(tmp_path: Path) -> None:
    (_, outgoing), before = sender(), threads()
    lost, other = address("tcp", tmp_path), address("tcp", tmp_path)
    with process(RECEIVER, lost) as child:
        outgoing.begin("r", lost, "", packed(TOKENS))
        outgoing.computed("r", list(range(10)), 5 * SIZE)
        until(lambda: outgoing._peers[lost]._region.write is not None and not outgoing._peers[lost]._owner)
        child.kill()
        outgoing.computed("r", list(range(10)), 10 * SIZE)
        outgoing.finish("r")
        until(lambda: outgoing.take_done() == ["r"])
    until(lambda: threads() == before)  # those of the agent have ended
    there, _ = receiver(other)
    outgoing.begin("r", other, "", packed(TOKENS))
    outgoing.computed("r", list(range(10)), 10 * SIZE)
    outgoing.finish("r")
    until(lambda: outgoing.take_done() == ["r"], there)
    assert len(there.found(TOKENS)) == 10


@pytest.mark.long
@pytest.mark.parametrize("times", [3])
def test_a_killed_sender_leaves_no_block_and_no_memory(tmp_path: Path, times: int) -> None:
    where = address("tcp", tmp_path)
    (there, incoming), before = receiver(where), threads()
    for _ in range(times):
        with process(SENDER, where) as child:
            taken = there.exchange.taken
            until(lambda seen=taken: there.exchange.taken > seen + 30, there)  # type: ignore[misc]
            assert incoming.connections == 1
            child.kill()
            until(lambda: incoming.connections == 0, there)
    until(lambda: not there.blocks._regions and threads() == before, there)
    assert there.pool.free + there.pool.cached == BLOCKS
