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
