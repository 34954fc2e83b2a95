"""What tests of every folder share; its place also puts `tiny` on the path."""

from pathlib import Path

import pytest
from tiny import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with a few thousand weights, a tokenizer and a chat template."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")
