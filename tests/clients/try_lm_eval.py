"""lm-eval: a small task of our own, with the server's tokenizer."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from trying import MODEL, URL, attempt, command

TASK = """\
task: colours
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: label
doc_to_choice: choices
metric_list:
  - metric: acc
"""
WRITTEN = """\
task: words
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: generate_until
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{choices[label]}}}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 8
metric_list:
  - metric: exact_match
"""
QUESTIONS = [
    {"question": "What colour is the sky?", "choices": [" blue", " red"], "label": 0},
    {"question": "What colour is grass?", "choices": [" green", " pink"], "label": 0},
    {"question": "What colour is snow?", "choices": [" black", " white"], "label": 1},
    {"question": "What colour is blood?", "choices": [" red", " green"], "label": 0},
]


def run(folder: Path, task: str) -> str:
    said = command(
        [
            *("lm_eval", "--model", "local-completions", "--tasks", task, "--include_path", str(folder)),
            *("--model_args", f"model={MODEL},base_url={URL}/v1/completions,tokenizer_backend=remote,max_retries=1"),
            *("--limit", "4", "--batch_size", "2"),
        ],
        folder,
        {"HF_DATASETS_OFFLINE": "1"},
    )
    assert f"|{task}" in said, said[-600:]
    return said[said.index(f"|{task}") :][:120]


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    (folder / "colours.yaml").write_text(TASK.format(data=data))
    (folder / "words.yaml").write_text(WRITTEN.format(data=data))
    attempt("multiple choice, by log-probabilities, with the remote tokenizer", lambda: run(folder, "colours"))
    attempt("written answers, with the remote tokenizer", lambda: run(folder, "words"))
