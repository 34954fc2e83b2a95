"""guidellm: a short benchmark."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from trying import MODEL, URL, attempt, command


def run(folder: Path) -> str:
    data = folder / "prompts.jsonl"
    data.write_text(
        "".join(
            json.dumps({"prompt": f"Name {number} colours.", "output_tokens_count": 16}) + "\n" for number in range(8)
        )
    )
    command(
        [
            *("guidellm", "run", "--backend", f"kind=openai_http,target={URL},model={MODEL}"),
            *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"),
            *("--data", f"kind=json_file,path={data}", "--output", f"kind=json,path={folder}/report.json"),
            "--disable-console-interactive",
        ],
        folder,
    )
    [benchmark] = json.loads((folder / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] >= 6 and not totals["errored"], totals
    return str(totals)


with tempfile.TemporaryDirectory() as name:
    attempt("six requests, two at a time", lambda: run(Path(name)))
