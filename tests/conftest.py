"""What tests of every folder share; its place also puts `tiny` on the path."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tiny import make_tiny_model

# Where bytecode files are switched off, each process that a test starts would compile all our modules: 2 s a server.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # `make test &` starts with SIGINT ignored, and so would every process that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Prepare torch, but not in the process that only hands tests out: the import takes 3 s."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if config.getoption("numprocesses", None) and not is_worker:
        return
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: its kernels run on the CPU
    if os.environ.get("TRITON_INTERPRET") == "1":
        from interpreter import make_faster

        make_faster()
    if is_worker:  # its core is its own; the servers that tests start choose for themselves
        torch.set_num_threads(1)


# The files that take longest, begun first, so that at the end no process waits for another's last file.
LONGEST = (
    "test_bounds.py",
    "test_killed_processes.py",
    "test_default_model.py",
    "test_text_bounds.py",
    "test_properties.py",
    "test_chaos.py",
    "test_gateway.py",
    "test_replicas.py",
    "test_limits.py",
    "test_policies.py",
    "test_cli.py",
    "test_schema.py",
    "test_triton.py",
    "test_kv_quant.py",
    "test_greedy.py",
    "test_compare.py",
    "test_offline.py",
    "test_beams.py",
    "test_routes.py",
    "test_scheduling.py",
    "test_explaining.py",
)

# Files that share a server (tests/serving/conftest.py) run in one process, or each process would start one.
SHARING = {
    **dict.fromkeys(
        (
            "test_bad_bodies.py",
            "test_best_of.py",
            "test_chaos.py",
            "test_fields.py",
            "test_no_token_left.py",
            "test_openai_client.py",
            "test_routes.py",
            "test_speculation_http.py",
        ),
        "server",
    ),
    **dict.fromkeys(
        ("test_messages.py", "test_responses.py", "test_structured_http.py", "test_text_bounds.py"), "thinker"
    ),
    **dict.fromkeys(("test_apis.py", "test_openai_leaving.py"), "slow"),
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file in one process, as `--dist loadfile` does, and those of files that share a server."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class SharedScheduling(LoadFileScheduling):  # type: ignore[misc, unused-ignore]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return SHARING.get(Path(file).name, file)

    return SharedScheduling(config, log)


# Minutes in which long tests may begin, so that CI ends on a slow machine too; the summary says how many did not.
LONG_MINUTES = float(os.environ.get("LONG_MINUTES", "inf"))
TOO_LATE = "the minutes of long tests are used up"
_began = time.monotonic()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("long") is not None and time.monotonic() - _began > 60 * LONG_MINUTES:
        pytest.skip(TOO_LATE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with a few thousand weights, a tokenizer and a chat template."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many events the core went through (each test of it reports its own), and what was not run."""
    reports = terminalreporter.getreports("passed")
    counts = [value for report in reports for name, value in report.user_properties if name == "core events"]
    if counts:
        terminalreporter.write_line(f"core: {sum(counts):,} random events, every promise checked after each")
    late = sum(TOO_LATE in str(report.longrepr) for report in terminalreporter.getreports("skipped"))
    if late:
        terminalreporter.write_line(f"{late:,} long tests were not run: LONG_MINUTES={LONG_MINUTES:g} were used up")
