"""llm, the command line tool, with a model in extra-openai-models.yaml."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from trying import MODEL, URL, attempt, command

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    (folder / "extra-openai-models.yaml").write_text(
        f"- model_id: chairlift\n  model_name: {MODEL}\n  api_base: {URL}/v1\n  api_key_name: none\n"
        "  supports_schema: true\n  supports_tools: true\n"
    )
    user = {"LLM_USER_PATH": name, "OPENAI_API_KEY": "none"}
    ask = ("llm", "-m", "chairlift", "-o", "max_tokens", "8", "--key", "none")
    attempt("a prompt, streamed", lambda: command((*ask, "Name a colour."), folder, user))
    attempt("a prompt, whole", lambda: command((*ask, "--no-stream", "Name a colour."), folder, user))
    attempt("a conversation goes on", lambda: command((*ask, "-c", "Another."), folder, user))
    longer = ("llm", "-m", "chairlift", "-o", "max_tokens", "200", "--key", "none")
    schema = json.dumps(
        {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 12}, "is_warm": {"type": "boolean"}},
            "required": ["name", "is_warm"],
            "additionalProperties": False,
        }
    )
    attempt(
        "a schema",
        lambda: (
            sorted(json.loads(command((*longer, "--schema", schema, "A colour."), folder, user))) == ["is_warm", "name"]
        ),
    )
    attempt(
        "a schema in llm's short form",
        lambda: json.loads(command((*longer, "--schema", "is_warm bool, hour int", "A colour."), folder, user)),
    )
    attempt("tools", lambda: command((*longer, "-T", "llm_version", "-T", "llm_time", "The time?"), folder, user))
