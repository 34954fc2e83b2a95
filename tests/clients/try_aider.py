"""aider: one message in an empty repository, without a person."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from trying import MODEL, URL, attempt, command


def once(folder: Path) -> str:
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    settings = folder / ".aider.model.settings.yml"
    settings.write_text(f"- name: openai/{MODEL}\n  extra_params:\n    max_tokens: 64\n")
    said = command(
        [
            *("aider", "--model", f"openai/{MODEL}", "--openai-api-base", f"{URL}/v1", "--openai-api-key", "none"),
            *("--message", "What is a colour? Answer in a few words.", "--yes-always", "--no-show-model-warnings"),
            *("--no-check-update", "--analytics-disable", "--no-pretty", "--no-gitignore", "--map-tokens", "0"),
            *("--chat-mode", "ask", "--no-detect-urls", "--no-suggest-shell-commands"),
        ],
        folder,
    )
    assert "Tokens:" in said and "litellm." not in said, said[-600:]
    return said[-200:]


with tempfile.TemporaryDirectory() as name:
    attempt("one message", lambda: once(Path(name)))
