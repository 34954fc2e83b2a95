"""What tests of every folder share; its place also puts `tiny` on the path."""

import os
import signal
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: its kernels then run on the CPU

from tiny import make_tiny_model

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # `make test &` starts with SIGINT ignored, and so would every process that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:  # its core is its own; the servers that tests start choose for themselves
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with a few thousand weights, a tokenizer and a chat template."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many events the core went through: each test of it reports its own."""
    reports = terminalreporter.getreports("passed")
    counts = [value for report in reports for name, value in report.user_properties if name == "core events"]
    if counts:
        terminalreporter.write_line(f"core: {sum(counts):,} random events, every promise checked after each")
