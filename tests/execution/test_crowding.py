"""Threads that would wait for a core are not used, and are tried again later."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numba
import pytest
import torch

from chairlift import LLM, SamplingParams
from chairlift.execution import crowding
from chairlift.execution.crowding import Crowding, crowding_of_process, run_delay
from chairlift.ops.assistant import Assistant, assistant, use_assistant

ONE = SamplingParams(temperature=0, max_tokens=1)


@contextmanager
def threads_restored() -> Iterator[None]:
    """Undo what an engine's crowding has set in this process."""
    threads, compiled = torch.get_num_threads(), numba.get_num_threads()
    try:
        yield
    finally:
        use_assistant(False)
        torch.set_num_threads(threads)
        numba.set_num_threads(compiled)


def of_process(monkeypatch: pytest.MonkeyPatch, chosen: Crowding) -> Crowding:
    """Let all engines share this one."""
    monkeypatch.setattr(crowding, "_of_process", chosen)
    return chosen


class Machine:
    """A simulated machine: other processes take some of its cores, and `run` advances its time."""

    def __init__(self, cores: int) -> None:
        self.now, self.waited, self.taken = 0.0, 0.0, 0.0
        self.crowding = Crowding(cores, lambda: self.now, lambda: self.waited)
        self.cores = cores

    def run(self, seconds: float) -> list[int]:
        """Return the numbers of threads in use meanwhile."""
        seen = []
        for _ in range(round(seconds / 0.05)):
            self.now += 0.05
            # Threads beyond the free cores wait as long as the others run.
            self.waited += 0.05 * max(0.0, self.crowding.threads - (self.cores - self.taken)) * 0.5
            self.crowding.look()
            seen.append(self.crowding.threads)
        return seen


def test_a_quiet_machine_uses_all_its_threads() -> None:
    assert set(Machine(4).run(100)) == {4}


@pytest.mark.parametrize("cores", [2, 4, 16])
def test_one_busy_process_costs_one_thread_until_it_ends(cores: int) -> None:
    machine = Machine(cores)
    machine.taken = 1.0
    seen = machine.run(100)
    assert set(seen) == {cores, cores - 1}
    assert seen.count(cores) < len(seen) / 20, "all threads are tried less and less often"
    machine.taken = 0.0
    assert machine.run(60)[-1] == cores


def test_one_thread_is_always_used() -> None:
    machine = Machine(1)
    machine.taken = 1.0
    assert set(machine.run(20)) == {1}


def test_a_process_that_starts_later_is_detected_at_once() -> None:
    machine = Machine(2)
    machine.run(50)
    machine.taken = 1.0
    assert machine.run(0.6)[-1] == 1


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs Linux's scheduler statistics")
def test_the_run_delay_of_a_thread_that_shares_its_core_is_measured() -> None:
    script = (
        "import os, subprocess, sys, time\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from chairlift.execution.crowding import run_delay\n"
        "other = subprocess.Popen([sys.executable, '-c', 'while True: pass'])\n"
        "before, end = run_delay(), time.monotonic() + 1\n"
        "while time.monotonic() < end: pass\n"
        "other.kill()\n"
        "print(run_delay() - before)\n"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(told.stdout) > 0.1
    assert run_delay() > 0


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs Linux's scheduler statistics")
def test_a_thread_that_ends_meanwhile_is_left_out_of_the_run_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of 0 would look, at the next measurement, as if all threads had waited all their lives just now."""
    before = run_delay()
    listed = [*Path("/proc/self/task").iterdir(), Path("/proc/self/task/0")]
    monkeypatch.setattr(Path, "iterdir", lambda _folder: iter(listed))
    assert run_delay() >= before > 0


def test_answers_do_not_depend_on_the_number_of_threads_in_use(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[5, 6, 7, 8] * 9, [9, 10], [11] * 30]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)
    found = []
    with threads_restored():
        for most, count in ((1, 1), (2, 2), (2, 1)):
            torch.set_num_threads(most)
            of_process(monkeypatch, Crowding(most, lambda: 0.0)).threads = count
            llm = LLM(str(tiny_model), progress=False)
            found.append([each.outputs[0] for each in llm.generate(prompts, params)])
            assert torch.get_num_threads() == count
            assert (assistant() is not None) == (count < most), "one thread of two has an assistant"
    assert found[0] == found[1] == found[2]


def test_an_engine_built_while_threads_are_few_returns_to_all_of_them(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with threads_restored():
        torch.set_num_threads(2)
        shared = of_process(monkeypatch, Crowding(2, lambda: 0.0))
        first = LLM(str(tiny_model), progress=False)
        shared.threads = 1  # another process is busy
        first.generate([[5, 6]], ONE)
        assert (torch.get_num_threads(), assistant() is not None) == (1, True)
        first.close()
        second = LLM(str(tiny_model), progress=False)
        shared.threads = 2  # it has ended
        second.generate([[5, 6]], ONE)
        assert (torch.get_num_threads(), assistant() is not None) == (2, False)
        torch.set_num_threads(3)
        assert crowding_of_process().most == 3, "a number that the user has chosen is the full one"


def test_the_kernels_of_the_assistant_are_compiled_before_the_first_request(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all requests wait for the compiler, some 10 seconds, when another process is busy for the first time."""
    shared: list[int] = []
    share = Assistant.share
    monkeypatch.setattr(Assistant, "share", lambda self, *work: shared.append(1) or share(self, *work))
    with threads_restored():
        for threads in (1, 2):
            torch.set_num_threads(threads)
            LLM(str(tiny_model), progress=False)
            assert bool(shared) == (threads > 1)
            assert assistant() is None
