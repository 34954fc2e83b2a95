"""A rank that dies or hangs ends the engine with an error that names it; no rank process outlives its engine."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from chairlift import LLM, SamplingParams
from chairlift.cluster.tensor_parallel import watch
from chairlift.cluster.tensor_parallel.build import Divided, load_model
from chairlift.cluster.tensor_parallel.channel import SLOT_BYTES, SLOTS, SharedReceiver, SharedSender
from chairlift.cluster.tensor_parallel.ranks import Ranks
from chairlift.core.errors import ChairliftError, EngineFault, SettingsError
from chairlift.core.settings import Settings
from processes import is_running

PARAMS = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
PROMPTS = [[5, 6, 7 + number] for number in range(6)]


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to hold"
        time.sleep(0.02)


@pytest.fixture
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), progress=False, tensor_parallel=2, overlap=True) as found:
        yield found


def pids(llm: LLM) -> list[int]:
    return llm._built.close.__self__.watch.pids  # type: ignore[attr-defined,no-any-return]


def check_memory(llm: LLM) -> None:
    """Check that no block is owned: the requests have all ended."""
    llm.close()
    llm.engine.scheduler.check()
    pool = llm.engine.scheduler.pool
    assert pool.free + pool.cached == pool.total


def test_a_rank_killed_in_the_middle_of_steps_ends_the_engine_with_its_name(llm: LLM) -> None:
    [pid] = pids(llm)
    assert llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2, ignore_eos=True))
    stream = llm.stream(PROMPTS[0], PARAMS)
    next(stream)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ChairliftError, match="rank 1 of 2 was killed by SIGKILL"):
        list(stream)
    with pytest.raises(EngineFault, match="rank 1 of 2 was killed by SIGKILL"):
        llm.generate([[5, 6, 7]], PARAMS)
    check_memory(llm)
    assert not is_running(pid)


@pytest.mark.long
def test_a_rank_killed_while_no_step_runs_is_noticed_at_once(llm: LLM) -> None:
    [pid] = pids(llm)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: llm.engine.fault is not None)
    with pytest.raises(EngineFault, match="rank 1 of 2 was killed by SIGKILL"):
        llm.generate([[5, 6, 7]], PARAMS)
    check_memory(llm)


@pytest.mark.long
def test_a_rank_that_hangs_is_killed_after_its_deadline(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "STALLED", 2.0)
    [pid] = pids(llm)
    stream = llm.stream(PROMPTS[0], PARAMS)
    next(stream)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(ChairliftError, match=r"(rank|ranks 0 and) 1 of 2 ha(s|ve) not answered for 2 s"):
        list(stream)
    check_memory(llm)
    assert not is_running(pid)


@pytest.mark.long
def test_an_interrupt_in_a_step_ends_the_ranks_and_is_raised(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from chairlift.models.decoder import Decoder

    [pid] = pids(llm)

    def interrupted(*_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Decoder, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6, 7]], PARAMS)
    monkeypatch.undo()
    with pytest.raises(EngineFault, match="interrupted by KeyboardInterrupt"):
        llm.generate([[5, 6, 7]], PARAMS)
    wait_until(lambda: not is_running(pid))


def test_an_error_of_a_rank_that_loads_is_the_error_of_the_start(tiny_model: Path) -> None:
    ranks = Ranks(2, torch.device("cpu"))
    with pytest.raises(ChairliftError, match="rank 1 of 2: no model '/nothing-here'"), ranks.ending_on_error():
        ranks.send({"load": {"model": "/nothing-here", "settings": {}}})
        ranks.group.least(0)
    assert not any(map(is_running, ranks.watch.pids))


@pytest.mark.long
def test_an_error_of_rank_0_that_loads_ends_the_others(tiny_model: Path, tmp_path: Path) -> None:
    ranks = Ranks(2, torch.device("cpu"))
    folder = tmp_path / "incomplete"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((tiny_model / name).read_bytes())
    (folder / "config.json").write_text(
        (folder / "config.json").read_text().replace('"hidden_size": 64', '"hidden_size": 32')
    )
    with pytest.raises(ChairliftError, match="config and weights belong to different models"):
        load_model(str(folder), Settings.of(tensor_parallel=2), progress=False, ranks=ranks)
    wait_until(lambda: not any(map(is_running, ranks.watch.pids)))


SCRIPT = """
import sys, time
from chairlift import LLM, SamplingParams
llm = LLM(sys.argv[1], progress=False, tensor_parallel=2)
llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
print(*llm._built.close.__self__.watch.pids, flush=True)
if sys.argv[2] == "run":
    llm.generate([[5, 6, 7]] * 8, SamplingParams(max_tokens=500, ignore_eos=True))
elif sys.argv[2] == "wait":
    time.sleep(60)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("doing", "is_stopped"),
    [
        ("run", False),
        pytest.param("wait", False, marks=pytest.mark.long),
        pytest.param("wait", True, marks=pytest.mark.long),
    ],
)
def test_no_rank_outlives_an_engine_that_is_killed(tiny_model: Path, doing: str, is_stopped: bool) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tiny_model), doing]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = [int(word) for word in process.stdout.readline().split()]
        assert len(found) == 1
        if is_stopped:
            os.kill(found[0], signal.SIGSTOP)
        process.kill()
        wait_until(lambda: not any(map(is_running, found)), 5.0)


@pytest.mark.long
def test_a_program_that_ends_without_closing_ends_its_ranks(tiny_model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tiny_model), "end"], capture_output=True, text=True, timeout=120, check=True
    )
    assert not is_running(int(done.stdout))
    assert done.stderr == ""


@pytest.mark.long
def test_an_llm_that_is_dropped_ends_its_ranks(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), progress=False, tensor_parallel=2)
    [pid] = pids(llm)
    threads = torch.get_num_threads()
    del llm
    gc.collect()
    assert not is_running(pid)
    assert threads <= torch.get_num_threads()


def test_a_message_longer_than_the_memory_arrives_whole_at_every_rank() -> None:
    sender = SharedSender(2)
    receivers = [SharedReceiver(sender.descriptor, bell, number) for number, bell in enumerate(sender.bells)]
    sent = [os.urandom(100), os.urandom(3 * SLOTS * SLOT_BYTES + 17), b"end"]
    got: list[list[bytes | None]] = [[], []]

    def read(number: int) -> None:
        got[number] = [receivers[number].receive() for _ in range(4)]

    readers = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for reader in readers:
        reader.start()
    for message in sent:
        sender.send(message)
    sender.close()
    for reader in readers:
        reader.join()
    assert got == [[*sent, None]] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel": 3}, "does not divide 4 heads over 2 KV heads and 128 MLP columns: use 1, 2 or 4"),
        ({"tensor_parallel": 2, "disk_cache": "/tmp"}, "tensor_parallel is 2 with a disk_cache"),
    ],
)
def test_what_ranks_cannot_do_is_refused_in_one_line(
    tiny_model: Path, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        LLM(str(tiny_model), progress=False, **settings)
    assert "\n" not in str(caught.value)


def test_the_default_model_says_that_three_ranks_work() -> None:
    with pytest.raises(SettingsError, match="9 heads over 3 KV heads and 1,536 MLP columns: use 1 or 3"):
        LLM(progress=False, tensor_parallel=2)


def test_ranks_are_only_in_a_model_that_has_several(tiny_model: Path) -> None:
    assert not isinstance(load_model(str(tiny_model), Settings.of(), progress=False), Divided)
