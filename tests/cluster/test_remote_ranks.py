"""Ranks that are reached over TCP, as on other hosts: the same tokens, and the same end when one is lost."""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from on_ranks import answers, llm_on

from chairlift import LLM, SamplingParams
from chairlift.cluster.tensor_parallel import remote as remote_module
from chairlift.cluster.tensor_parallel.memory import Board, make_memory
from chairlift.cluster.tensor_parallel.rank_host import RankHost
from chairlift.cluster.tensor_parallel.ranks import Ranks
from chairlift.cluster.tensor_parallel.remote import Remote, RemoteProcess
from chairlift.cluster.tensor_parallel.watch import RankProcess, Watch
from chairlift.core.errors import ChairliftError

LOOPBACK, KEY = "127.0.0.1", "a key that the hosts know"
CPU = torch.device("cpu")
PROMPTS = [[5, 9, 12, 7], list(range(20, 90)), [3] * 40]


@pytest.fixture
def host() -> Iterator[RankHost]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
    found = RankHost(LOOPBACK, KEY, {**os.environ, **threads})
    yield found
    found.close()


def remote(*hosts: RankHost, key: str = KEY) -> Remote:
    return Remote([host.address for host in hosts], key, LOOPBACK)


def test_tokens_on_remote_ranks_equal_those_of_one_rank_and_a_host_takes_engines_until_one_loses_its_rank(
    host: RankHost, tiny_model: Path
) -> None:
    """A rank that is killed ends its engine with an error that names it."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    settings = {"dtype": "float32", "kv_tokens": 512}
    with LLM(str(tiny_model), **settings) as one:
        expected = answers(one, PROMPTS, params)
    for is_killed in (False, True):
        ranks = Ranks(2, CPU, remote(host))
        with llm_on(ranks, tiny_model, **settings) as llm:
            assert answers(llm, PROMPTS, params) == expected
            if is_killed:
                assert host.pid is not None
                os.kill(host.pid, signal.SIGKILL)
                with pytest.raises(ChairliftError, match="rank 1 of 2: its process or its host has ended"):
                    answers(llm, PROMPTS, SamplingParams(max_tokens=200, ignore_eos=True))
        ranks.close()


def test_another_key_is_refused(host: RankHost) -> None:
    with pytest.raises(ChairliftError, match="rank 1 of 2"):
        Ranks(2, CPU, remote(host, key="another key"))


def test_a_host_that_is_not_there_is_an_error_that_names_the_rank(host: RankHost) -> None:
    with socket.create_server((LOOPBACK, 0)) as free:
        nowhere = f"{LOOPBACK}:{free.getsockname()[1]}"
    with pytest.raises(ChairliftError, match=f"rank 2 of 3: tcp:{nowhere} cannot be reached"):
        Ranks(3, CPU, Remote([host.address, nowhere], KEY, LOOPBACK))


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n" * 10, b"\xff" * 100])
def test_what_does_not_prove_the_key_starts_nothing(host: RankHost, sent: bytes) -> None:
    name, port = host.address.split(":")
    with socket.create_connection((name, int(port))) as link:
        link.sendall(sent)
        with suppress(OSError):  # it may have closed already
            link.shutdown(socket.SHUT_WR)
        link.settimeout(20)
        with suppress(ConnectionResetError):  # it closes with bytes of ours that it has not read
            while link.recv(1024):  # its random number, then the end
                pass
    assert host.pid is None


def test_a_peer_without_the_key_that_sends_byte_after_byte_holds_a_host_for_a_moment_only(
    host: RankHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "PROOF_SECONDS", 0.2)
    name, port = host.address.split(":")
    with socket.create_connection((name, int(port))) as slow, suppress(ConnectionError):
        for _ in range(40):
            slow.sendall(b"x")
            time.sleep(0.02)
        raise AssertionError("the host waits for the 64 bytes of a proof")


@pytest.mark.parametrize("number", [errno.ECONNRESET, errno.ETIMEDOUT, errno.EHOSTUNREACH])
def test_a_host_that_is_gone_is_named_whatever_error_its_connection_ends_with(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that loses power closes nothing: after the last keep-alive, reading is an error of its own."""
    near, far = socket.socketpair()
    reports = os.dup(near.fileno())
    read = os.read

    def lost(descriptor: int, size: int) -> bytes:
        if descriptor == reports:
            raise OSError(number, os.strerror(number))
        return read(descriptor, size)

    monkeypatch.setattr(os, "read", lost)
    far.close()
    faults: list[str] = []
    board = Board(make_memory(Board.size(2)), 0)
    Watch([RankProcess(1, [], {}, [], reports, RemoteProcess(near))], board, faults.append).close()
    assert faults == ["rank 1 of 2: its process or its host has ended"]


def test_a_host_that_is_gone_before_its_first_message_is_an_error_that_names_the_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    near, far = socket.socketpair()
    far.close()
    monkeypatch.setattr("chairlift.cluster.tensor_parallel.ranks.call", lambda _: [near])
    with pytest.raises(ChairliftError, match="rank 1 of 2: its process or its host has ended"):
        Ranks(2, CPU, Remote(["there:1"], KEY, LOOPBACK))
