"""Draw the pictures of the documentation from real runs: `python benchmarks/figures.py [scheduling|chat|serve]`."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from chairlift.core.blocks import BlockPool
from chairlift.core.limits import Limits
from chairlift.core.params import SamplingParams
from chairlift.core.plan import StepPlan
from chairlift.core.request import Request
from chairlift.core.scheduler import Scheduler
from chairlift.core.step import StepResult
from chairlift.report.drawing import COLORS

IMAGES = Path(__file__).parents[1] / "docs" / "images"
CELL, LEFT, HEAD = 22, 92, 44  # pixels: a cell, the left margin, the height of the title


def scheduling() -> str:
    """Draw the scheduler's plans, step by step, of eight requests with a batch of four."""
    pool = BlockPool(total=16, block_size=4)
    scheduler = Scheduler(Limits(max_sequences=4, step_tokens=12, max_length=40, vocab_size=100), pool)
    lengths = [(14, 12), (5, 16), (9, 8), (20, 9), (4, 14), (6, 6), (11, 10), (3, 8)]
    for name, (prompt, answer) in zip("ABCDEFGH", lengths, strict=True):
        scheduler.submit(Request(name, [1] * prompt, SamplingParams(max_tokens=answer)))
    steps: list[tuple[StepPlan, list[tuple[int, str, int, int]], int, int]] = []
    while scheduler.has_work:
        plan = scheduler.plan(float(len(steps)))
        slices = [(s.row, s.request.id, start, count) for s, start, count in plan.slices]
        steps.append((plan, slices, pool.owned, len(scheduler.waiting)))
        scheduler.apply(plan, StepResult([7] * len(plan.samples)))
    return draw_steps(steps, pool.total)


def draw_steps(steps: list[tuple[StepPlan, list[tuple[int, str, int, int]], int, int]], blocks: int) -> str:
    """Draw rows of the batch down, steps across; a dark cell is a prompt chunk, a light one a decode."""
    rows, width = 4, LEFT + CELL * len(steps) + 20
    floor = HEAD + rows * CELL + 26
    height = floor + 96
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>',
        '<text x="12" y="16" font-size="13">Eight requests, a batch of four: each column is one forward pass.</text>',
        '<text x="12" y="33">Dark: a prompt chunk, with its length. Light: a decode.</text>',
    ]
    for row in range(rows):
        out.append(f'<text x="12" y="{HEAD + row * CELL + 15}">row {row + 1}</text>')
    for column, (plan, slices, owned, waiting) in enumerate(steps):
        x = LEFT + column * CELL
        for row, name, start, count in slices:
            color, y = COLORS["ABCDEFGH".index(name)], HEAD + row * CELL
            is_prompt = count > 1 or start == 0
            shade = 1.0 if is_prompt else 0.35
            out.append(
                f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" fill="{color}" opacity="{shade}"/>'
            )
            label, fill = (str(count), "white") if is_prompt else (name, "#333")
            out.append(f'<text x="{x + 10}" y="{y + 14}" text-anchor="middle" fill="{fill}">{label}</text>')
        for victim in plan.preempted:
            y = HEAD + rows * CELL + 12
            out.append(f'<text x="{x + 10}" y="{y}" text-anchor="middle" fill="#C00">{victim.request.id}↩</text>')
        for value, most, base, color in ((owned, blocks, floor + 34, "#4C78A8"), (waiting, 8, floor + 80, "#999")):
            bar = 30 * value / most
            out.append(f'<rect x="{x}" y="{base - bar:.1f}" width="{CELL - 2}" height="{bar:.1f}" fill="{color}"/>')
    out.append(f'<text x="12" y="{HEAD + rows * CELL + 12}" fill="#C00">preempted</text>')
    out.append(f'<text x="12" y="{floor + 30}">KV blocks</text><text x="12" y="{floor + 76}">waiting</text>')
    return "\n".join([*out, "</svg>"])


def chat() -> str:
    """Draw a chat with the default model, as a terminal shows it."""
    questions = ["What is a chairlift?", "Write one sentence about mountains."]
    command = [sys.executable, "-m", "chairlift", "chat", "--temperature", "0", "--max-tokens", "60"]
    ours, theirs = pty.openpty()
    env = {**os.environ, "COLUMNS": "100", "TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, close_fds=True)
    os.close(theirs)
    seen = read_until(ours, "/help for help")
    for question in questions:
        time.sleep(2)
        os.write(ours, (question + "\n").encode())
        seen += read_until(ours, "tok/s")
    os.write(ours, b"/quit\n")
    process.wait(timeout=30)
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(Text("$ make chat", style="bold green"))
    shown = [line.rsplit("\r", 1)[-1] for line in seen.replace("\r\n", "\n").split("\n")]
    console.print(Text.from_ansi("\n".join(line for line in shown if line.strip())))
    return console.export_svg(title="chairlift chat")


def serve() -> str:
    """Draw a server and a reply, as two terminals show them."""
    command = [sys.executable, "-m", "chairlift", "serve", "--log-format", "words"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    log = ""
    while "max_tokens" not in log:
        line = server.stderr.readline()
        assert line, f"the server did not start: {log}"
        log += line
    body = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 40, "temperature": 0}
    address = "http://127.0.0.1:8000"
    head = ["curl", "-s", f"{address}/v1/chat/completions", "-H", "Content-Type: application/json", "-d"]
    answer = subprocess.run([*head, json.dumps(body)], capture_output=True, text=True, check=True).stdout
    metrics = subprocess.run(["curl", "-s", f"{address}/metrics"], capture_output=True, text=True, check=True).stdout
    log += server.stderr.readline()
    server.terminate()
    server.wait(timeout=30)
    counted = [line for line in metrics.splitlines() if "tokens_total{" in line or "_first_token_seconds_sum" in line]
    console = Console(record=True, width=118, file=io.StringIO())
    console.print(Text("$ make serve", style="bold green"))
    console.print(Text(log.strip("\n")))
    console.print(Text("\n$ curl " + log.split("curl ", 1)[1].split("\n\n")[0], style="bold green"))
    console.print_json(answer)
    console.print(Text(f"\n$ curl -s {address}/metrics | grep tokens", style="bold green"))
    console.print(Text("\n".join(counted[:4])))
    return console.export_svg(title="chairlift serve")


def read_until(terminal: int, mark: str) -> str:
    """Read the terminal's output until `mark` appears in it."""
    text = ""
    while mark not in text:
        text += os.read(terminal, 4096).decode(errors="replace")
    return text


if __name__ == "__main__":
    figures = {"scheduling": scheduling, "chat": chat, "serve": serve}
    for name in sys.argv[1:] or figures:
        (IMAGES / f"{name}.svg").write_text(figures[name]())
        print(f"drew {IMAGES / name}.svg")
