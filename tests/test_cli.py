"""The command line, as a shell sees it: real processes, real pipes, a tiny real model."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from chairlift import LLM, SamplingParams, __version__, cli
from chairlift.commands.options import DEFAULT_MODEL, SAMPLING
from chairlift.core.settings import options
from chairlift.models import sources
from tiny import make_tiny_model

STATS = re.compile(r"(\d+) tokens?(, [\d.]+ tok/s)?, first token after [\d.]+ s")


SETTING = re.compile(rf"(?<![\w-])({'|'.join(found.name for _, found in options() if '_' in found.name)})(?!\w)")


def chairlift(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "chairlift", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)


CHAIRLIFT = (sys.executable, "-m", "chairlift")


@contextmanager
def started(*arguments: str, program: Sequence[str] = CHAIRLIFT) -> Iterator[subprocess.Popen[bytes]]:
    """A command under way, ended with the block."""
    pipe = subprocess.PIPE
    with subprocess.Popen([*program, *arguments], stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model without an end token: its answers last longer than any test."""
    folder = tmp_path_factory.mktemp("endless") / "llama"
    make_tiny_model(folder, max_position_embeddings=32768, eos_token_id=None)
    described = folder / "tokenizer_config.json"
    described.write_text(json.dumps({**json.loads(described.read_text()), "eos_token": None}))
    return str(folder)


ENDLESS = ("--max-tokens", "30000", "--kv-tokens", "32768")


def test_help_comes_without_loading_torch() -> None:
    code = "import sys; from chairlift import cli; cli.main(); assert False"
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code, "--help"], capture_output=True, text=True, check=True
    )
    for command in ("run", "chat", "batch", "pull", "bench"):
        assert command in shown.stdout
    assert not re.search(r"\| +(torch|numpy|numba|tokenizers)\n", shown.stderr)
    assert chairlift("--version").stdout == f"{__version__}\n"


def test_every_setting_is_a_flag() -> None:
    shown = chairlift("run", "--help-all").stdout
    names = {found.name for _, found in options()} | {flag.name for flag in SAMPLING}
    assert [name for name in sorted(names) if f"--{name.replace('_', '-')}" not in shown] == []


def test_the_default_model_is_the_one_that_is_fetched() -> None:
    assert DEFAULT_MODEL == sources.DEFAULT_MODEL


def test_run_writes_the_answer_and_nothing_else(tiny_model: Path) -> None:
    done = chairlift("run", "Hi", "--model", str(tiny_model), "--temperature", "0", "--max-tokens", "12")
    llm = LLM(str(tiny_model), progress=False)
    params = SamplingParams(temperature=0, max_tokens=12)
    [expected] = llm.chat([{"role": "user", "content": "Hi"}], params, progress=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, expected.outputs[0].text + "\n", "")


@pytest.mark.long
def test_run_completes_what_comes_through_a_pipe_several_times(tiny_model: Path) -> None:
    asked = ("run", "--raw", "-m", str(tiny_model), "--n", "3", "--max-tokens", "8", "--seed", "5")
    done = chairlift(*asked, "--temperature", "2", text="The chair\n")
    llm = LLM(str(tiny_model), progress=False)
    params = SamplingParams(n=3, max_tokens=8, seed=5, temperature=2)
    [expected] = llm.generate("The chair", params)
    texts = [answer.text for answer in expected.outputs]
    assert len(set(texts)) == 3
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n---\n".join(texts) + "\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "Hi", "--model", "no-such-model"], "no model 'no-such-model'"),
        (["run", "Hi", "--temperature", "-1"], "--temperature is -1.0"),
        (["run", "Hi", "--max-tokens", "0"], "--max-tokens is 0, out of range: use 1 or more"),
        (["run", "Hi", "--kv-tokens", "0"], "--kv-tokens is 0: use 1 or more, or leave it out"),
        (["run", "Hi", "--disk-cache", "x", "--host-tokens", "0"], "--disk-cache needs host memory to copy through"),
        (["run", "Hi", "--max-length", "1"], "--max-length is 1"),
        (["serve", "--target-tpot", "1s", "--prefill", "whole"], "set --prefill to chunked or leave --target-tpot out"),
        (["serve", "no-such-model"], "no model 'no-such-model'"),
        (["serve", "one", "--model", "other"], "MODEL is 'one' and --model is 'other': give one of them"),
        (["run", ""], "the prompt is empty"),
        (["chat", "--block-size", "7"], "--block-size is 7"),
        (["chat", "--device", "abacus"], "--device 'abacus' is unknown"),
        (["pull", "no-such-model"], "no model 'no-such-model'"),
        (["bench", "offline", "--workload", "nothing"], "there is no workload 'nothing'"),
        (["bench", "offline", "--shape", "smollm2-135m", "--compare", "abacus"], "there is no engine 'abacus'"),
    ],
)
def test_what_the_user_got_wrong_is_one_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["chairlift", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    said = str(left.value.code)  # Python writes it to stderr and exits with 1
    assert said.startswith("error: ") and message in said and "\n" not in said
    assert "None" not in said and not SETTING.search(said), "the command line has flags"


def test_the_module_of_the_command_line_runs_it() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "chairlift.cli", "--version"], capture_output=True, text=True, timeout=60
    )
    assert (found.returncode, found.stdout.strip()) == (0, __version__)


def test_an_error_leaves_no_traceback_and_exits_with_one() -> None:
    failed = chairlift("pull", "no-such-model")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.startswith("error: ") and failed.stderr.count("\n") == 1
    assert chairlift("run", "--policy", "nonsense").returncode == 2


def test_pull_prints_where_the_model_lies(tiny_model: Path) -> None:
    assert chairlift("pull", str(tiny_model)).stdout == f"{tiny_model}\n"


@pytest.mark.long
def test_chat_answers_the_lines_of_a_pipe(tiny_model: Path) -> None:
    lines = ["Hi", "", "/nonsense", "And you?", "/reset", "Hi", "/help", "/quit", "never read"]
    asked = ("chat", "--model", str(tiny_model), "--temperature", "0", "--max-tokens", "10", "--system", "Ski!")
    done = chairlift(*asked, text="\n".join(lines))
    assert done.returncode == 0
    llm = LLM(str(tiny_model), progress=False)
    talk = [{"role": "system", "content": "Ski!"}, {"role": "user", "content": "Hi"}]
    params = SamplingParams(temperature=0, max_tokens=10)
    first = llm.chat(talk, params)[0].outputs[0].text
    talk += [{"role": "assistant", "content": first}, {"role": "user", "content": "And you?"}]
    second = llm.chat(talk, params)[0].outputs[0].text
    assert done.stdout == f"{first}\n{second}\n{first}\n"  # the third knows nothing of the others
    assert "llama on cpu in float32" in done.stderr and "KV cache: " in done.stderr
    assert "there is no command /nonsense" in done.stderr and "/reset  begin" in done.stderr
    assert len(STATS.findall(done.stderr)) == 3


@pytest.mark.long
def test_chat_drops_the_oldest_turns_when_the_context_is_full(tiny_model: Path) -> None:
    lines = [f"The assistant said {i}" for i in range(6)] + ["x" * 400, "still there?"]
    done = chairlift(
        *("chat", "-m", str(tiny_model), "--max-length", "128", "--max-tokens", "16", "--temperature", "0"),
        text="\n".join(lines),
    )
    assert done.returncode == 0
    assert "the context is full: dropped the oldest" in done.stderr
    assert "max_length" not in done.stderr
    assert "error: the prompt has" in done.stderr  # one message too long for the context; the conversation goes on
    assert len(STATS.findall(done.stderr)) == 7


@pytest.mark.long
def test_ctrl_c_ends_a_run_quietly(endless_model: str) -> None:
    with started("run", "Hi", "-m", endless_model, *ENDLESS) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr.read() == b""


@pytest.mark.long
def test_an_interrupt_ends_a_command_that_a_shell_started_with_sigint_ignored(endless_model: str) -> None:
    ignoring = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", sys.executable, "-m", "chairlift"]  # as `command &` does
    with started("run", "Hi", "-m", endless_model, *ENDLESS, program=ignoring) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


@pytest.mark.long
def test_ctrl_c_in_a_chat_stops_the_answer_alone(endless_model: str) -> None:
    with started("chat", "-m", endless_model, *ENDLESS) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        for _ in range(2):
            while select.select([process.stdout], [], [], 0)[0]:
                process.stdout.read(4096)  # what is left of the answer before
            process.stdin.write(b"Hi\n")
            assert process.stdout.read(1)  # the answer has begun
            process.send_signal(signal.SIGINT)
            line = b""
            while not STATS.search(line.decode()):
                line = process.stderr.readline()
                assert line, "the chat has ended"
        _, rest = process.communicate(timeout=20)
        assert process.returncode == 0 and b"Traceback" not in rest


@contextmanager
def in_a_terminal(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[bytes], bytes], int]]:
    """A command in a terminal, a function that reads what it writes up to some bytes, and where keys are typed."""
    ours, theirs = pty.openpty()
    with subprocess.Popen([*CHAIRLIFT, *arguments], stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        seen = b""

        def read_until(wanted: bytes) -> bytes:
            nonlocal seen
            while wanted not in seen:
                seen += os.read(ours, 4096)
            before, seen = seen.split(wanted, 1)
            return before

        try:
            yield process, read_until, ours
        finally:
            process.kill()
            os.close(ours)


@pytest.mark.long
def test_chat_in_a_terminal_prompts_and_leaves_with_ctrl_d(tiny_model: Path) -> None:
    with in_a_terminal("chat", "-m", str(tiny_model), "--max-tokens", "5") as (process, read_until, typed):
        read_until(b"> ")
        os.write(typed, b"Hi\n")
        read_until(b"first token after")
        read_until(b"> ")
        os.write(typed, b"\x04")
        assert process.wait(20) == 0


def interrupt_while_it_reads(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a process that sleeps: between prompt and read, Python keeps a signal until a key is pressed."""
    while Path("/proc/self/stat").exists() and process.poll() is None:
        if Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S":
            break
    process.send_signal(signal.SIGINT)


@pytest.mark.long
def test_ctrl_c_twice_at_the_prompt_leaves_a_chat_and_once_does_not(tiny_model: Path) -> None:
    with in_a_terminal("chat", str(tiny_model), "--max-tokens", "5") as (process, read_until, typed):
        read_until(b"> ")
        interrupt_while_it_reads(process)
        assert b"press Ctrl-C again to quit" in read_until(b"> ")
        os.write(typed, b"Hi\n")
        read_until(b"first token after")
        read_until(b"> ")
        interrupt_while_it_reads(process)  # the first again, since a message was sent in between
        assert b"press Ctrl-C again to quit" in read_until(b"> ")
        interrupt_while_it_reads(process)
        assert process.wait(20) == 0


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--max-model-len", "--max-model-len is called --max-length here"),
        ("--pipeline-parallel-size", "there is no --pipeline-parallel-size here"),
    ],
)
def test_a_flag_of_vllm_is_answered_with_ours(flag: str, hint: str) -> None:
    answer = chairlift("serve", flag, "1")
    assert answer.returncode == 1
    assert hint in answer.stderr
