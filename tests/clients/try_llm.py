"""llm, the command line tool, with a model in extra-openai-models.yaml."""

from __future__ import annotations

import tempfile
from pathlib import Path

from trying import MODEL, URL, attempt, command

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    (folder / "extra-openai-models.yaml").write_text(
        f"- model_id: chairlift\n  model_name: {MODEL}\n  api_base: {URL}/v1\n  api_key_name: none\n"
    )
    user = {"LLM_USER_PATH": name, "OPENAI_API_KEY": "none"}
    ask = ("llm", "-m", "chairlift", "-o", "max_tokens", "8", "--key", "none")
    attempt("a prompt, streamed", lambda: command((*ask, "Name a colour."), folder, user))
    attempt("a prompt, whole", lambda: command((*ask, "--no-stream", "Name a colour."), folder, user))
    attempt("a conversation goes on", lambda: command((*ask, "-c", "Another."), folder, user))
