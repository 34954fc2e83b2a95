"""Take the pictures of the live page in docs/images, from a real server in a real browser.

    python benchmarks/page_pictures.py [--folder docs/images]

It needs chromium, playwright and Pillow (all in the dev extras but chromium), and a few minutes: the default model
serves a chat mix on this machine. The animation is the same run, saved by the page and played step by step.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / each) for each in ("serving", "ui", ".")]

from browser import Visit, chromium, visiting  # noqa: E402
from running import Running, running  # noqa: E402

MODEL = "smollm2-135m"
# A cache so small that sequences are preempted, and drafts from the prompt, so that every colour has its turn.
FLAGS = ("--max-sequences", "12", "--max-length", "512", "--kv-tokens", "768", "--speculation", "ngram")
SYSTEM = (
    "You are the guide of a small mountain resort. You know every lift and every slope, you answer in a few plain "
    "sentences, and you repeat the question before you answer it."
)
QUESTIONS = (
    "Which lift opens first in the morning?",
    "Write the numbers from one to twenty, one by one.",
    "How cold is it at the summit, and what should I wear for a whole day up there with two children?",
    "Repeat after me: the chairlift never stops for one skier, it never stops for one skier.",
    "List five things to pack for a day of skiing.",
    "Where is the ski school?",
    "Tell me a long story about the first lift of the valley and the people who built it.",
)
COLUMNS = 230  # of the batch before pictures are taken


@contextmanager
def crowd(server: Running, clients: int = 14) -> Iterator[None]:
    """Chats that come one after the other."""
    is_over = threading.Event()

    def chat(seed: int) -> None:
        rng = random.Random(seed)
        while not is_over.is_set():
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": rng.choice(QUESTIONS)}]
            body = {"messages": messages, "max_tokens": rng.choice((12, 32, 64, 96)), "temperature": 0.3, "seed": seed}
            server.post("/v1/chat/completions", body, timeout=300)

    asking = [threading.Thread(target=chat, args=(seed,), daemon=True) for seed in range(clients)]
    for each in asking:
        each.start()
    yield
    is_over.set()


def shoot(visit: Visit, path: Path) -> None:
    """Take a screenshot."""
    raw = visit.page.screenshot()
    Image.open(BytesIO(raw)).convert("RGB").save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def take_live(browser: Any, folder: Path, saved: Path) -> None:
    """Take the pictures of a live server, and save its run."""
    with (
        running(MODEL, *FLAGS) as server,
        crowd(server),
        visiting(browser, server.url) as light,
        visiting(browser, server.url, color_scheme="dark") as dark,
    ):
        light.page.set_viewport_size({"width": 1360, "height": 1180})
        light.page.click("#zoom-in")
        dark.page.set_viewport_size({"width": 1360, "height": 1000})
        dark.page.click("#playground-toggle")
        light.until(f"histories[0]?.cursor > {COLUMNS}", 580)
        canvas = light.page.locator("canvas.lanes")
        box = canvas.bounding_box()
        canvas.hover(position={"x": box["width"] * 0.58, "y": box["height"] * 0.3})
        light.page.wait_for_timeout(400)
        shoot(light, folder / "page-light.png")
        with light.page.expect_download() as download:
            light.page.click("#save")
        download.value.save_as(saved)
        dark.page.fill("#play-text", "Name three famous mountains.")
        dark.page.click(".ask .primary")
        dark.until("document.querySelectorAll('.token').length > 40", 300)
        dark.page.locator(".token").nth(12).hover()
        dark.page.wait_for_timeout(300)
        shoot(dark, folder / "page-dark.png")


def take_recorded(browser: Any, folder: Path, saved: Path) -> None:
    """Take the picture of a phone and the animation, of the saved run."""
    command = [sys.executable, "-m", "chairlift", "view", str(saved), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = next(word for line in process.stderr for word in line.split() if word.startswith("http"))
        try:
            with visiting(browser, url) as visit:
                visit.page.set_viewport_size({"width": 900, "height": 900})
                visit.until("player.length > 0")
                visit.page.click("#zoom-in")
                animate(visit, folder / "page.gif")
            with visiting(browser, url) as phone:
                phone.page.set_viewport_size({"width": 390, "height": 844})
                phone.until("player.length > 0")
                phone.page.evaluate("chairlift.player.seek(chairlift.histories, 0.9); chairlift.player.pause()")
                phone.page.wait_for_timeout(600)
                shoot(phone, folder / "page-phone.png")
        finally:
            process.terminate()


def animate(visit: Visit, path: Path, frames: int = 56, steps: int = 2) -> None:
    """Write the batch as it moves, a few steps a frame."""
    visit.page.evaluate("chairlift.player.seek(chairlift.histories, 0.999); chairlift.player.pause()")
    visit.page.evaluate(f"chairlift.player.step(chairlift.histories, {-frames * steps})")
    card = visit.page.locator(".engine .picture")
    pictures = []
    for _ in range(frames):
        visit.page.evaluate(f"chairlift.player.step(chairlift.histories, {steps})")
        visit.page.wait_for_timeout(50)
        pictures.append(Image.open(BytesIO(card.screenshot())).convert("RGB"))
    first = pictures[-1].quantize(24, dither=Image.Dither.NONE)
    small = [each.quantize(palette=first, dither=Image.Dither.NONE) for each in pictures]
    small[0].save(path, save_all=True, append_images=small[1:], duration=110, loop=0, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def main() -> None:
    """Take all pictures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path(__file__).parents[1] / "docs" / "images")
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as scratch, chromium() as browser:
        saved = Path(scratch) / "run.jsonl"
        take_live(browser, folder, saved)
        take_recorded(browser, folder, saved)


if __name__ == "__main__":
    main()
