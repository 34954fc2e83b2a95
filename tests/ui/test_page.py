"""The live page in a real browser: it follows a real server, plays recordings, and shows what clients sent as text."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from browser import chromium, needs_browser, visiting

sys.path.append(str(Path(__file__).parents[1] / "serving"))
from running import Running, keys_file, running

from tiny import make_tiny_model

pytestmark = needs_browser
BODY = {"prompt": "Everyone gets off where they want.", "max_tokens": 120, "ignore_eos": True, "temperature": 1.0}
HOSTILE = '<img src=x onerror="window.broken=1"><script>window.broken=1</script>'


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    name = "tiny <b>model</b>"
    model = make_tiny_model(tmp_path_factory.mktemp("page") / "llama", max_position_embeddings=1024)
    with running(model, "--max-sequences", "4", "--served-model-name", name, "--device", "cpu") as started:
        yield started


@contextmanager
def busy(server: Running, clients: int = 6) -> Iterator[None]:
    """Requests that come one after the other, more at a time than the batch has rows."""
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            server.post("/v1/completions", BODY)

    asking = [threading.Thread(target=ask) for _ in range(clients)]
    for each in asking:
        each.start()
    try:
        yield
    finally:
        is_over.set()
        for each in asking:
            each.join()


def host_of(server: Running) -> str:
    return urlsplit(server.url).netloc


def painted(visit: Any) -> set[str]:
    """The names of the colours that the picture of the batch has."""
    script = """() => {
      const canvas = document.querySelector("canvas.lanes");
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      const seen = new Set();
      for (let i = 0; i < data.length; i += 4) seen.add((data[i] << 16) | (data[i + 1] << 8) | data[i + 2]);
      const style = getComputedStyle(document.documentElement);
      const names = ["prefill", "decode", "cached", "finished", "preempted"];
      const number = (name) => parseInt(style.getPropertyValue("--" + name).trim().slice(1), 16);
      return names.filter((name) => seen.has(number(name)));
    }"""
    return set(visit.page.evaluate(script))


# ---- a live server


def test_the_page_follows_the_batch_of_a_server_and_asks_no_other_server_for_anything(
    browser: Any, server: Running
) -> None:
    with busy(server), visiting(browser, server.url) as visit:
        visit.until("histories[0]?.cursor > 100")
        before = visit.known("histories[0].cursor")
        visit.until(f"histories[0].cursor > {before} + 50")
        visit.until("histories[0].lookNow()?.queue.length > 0")
        visit.until("document.querySelector('.why')?.textContent.length > 20")
        assert {"prefill", "decode", "finished"} <= painted(visit)
        assert visit.page.text_content("#status span") == "live"
        visit.until("parseInt(document.getElementById('meter-output').textContent) > 0")
        visit.until("/s$/.test(document.getElementById('meter-ttft').textContent)")
        visit.until_text("#queue", "rows")  # why they wait
        assert "4 rows" in (visit.page.text_content(".engine") or "")
        visit.check(host_of(server))


def test_pausing_stepping_and_zooming_work_with_the_keyboard_and_the_buttons(browser: Any, server: Running) -> None:
    with busy(server), visiting(browser, server.url) as visit:
        visit.until("histories[0]?.cursor > 60")
        visit.page.keyboard.press("Space")
        held = visit.known("histories[0].cursor")
        visit.until(f"histories[0].end > {held} + 40")  # the server goes on
        assert visit.known("histories[0].cursor") == held
        assert visit.page.get_attribute("#pause", "aria-pressed") == "true"
        visit.page.keyboard.press("ArrowLeft")
        visit.page.click("#back")
        assert visit.known("histories[0].cursor") == held - 2
        visit.page.click("#forward")
        assert visit.known("histories[0].cursor") == held - 1
        narrow = visit.page.evaluate("document.querySelector('canvas.lanes').toDataURL()")
        visit.page.click("#zoom-in")
        visit.page.click("body", position={"x": 2, "y": 2})
        visit.page.keyboard.press("+")
        visit.until(f"document.querySelector('canvas.lanes').toDataURL() !== {json.dumps(narrow)}")
        visit.page.click("#pause")
        visit.until(f"histories[0].cursor > {held} + 40")
        visit.check(host_of(server))


@pytest.mark.long
def test_the_pointer_tells_the_request_its_lengths_and_its_times(browser: Any, server: Running) -> None:
    with busy(server), visiting(browser, server.url) as visit:
        visit.until("histories[0]?.cursor > 200")
        visit.page.keyboard.press("Space")
        canvas = visit.page.locator("canvas.lanes")
        box = canvas.bounding_box()
        canvas.hover(position={"x": box["width"] - 40, "y": 80})
        told = visit.page.locator(".picture .tip").inner_text()
        assert re.search(r"request\n[0-9a-f]{32}", told), told
        assert re.search(r"prompt\n[0-9]+ tokens", told) and re.search(r"waited\n[0-9.]+ m?s", told), told
        visit.page.mouse.move(5, 5)
        assert visit.page.locator(".picture .tip").is_hidden()
        canvas.focus()
        visit.page.keyboard.press("ArrowDown")
        assert visit.page.locator(".picture .tip").is_visible(), "arrow keys reach what the pointer does"
        visit.page.click(".as-table summary")
        visit.page.wait_for_selector(".as-table tbody tr")
        assert visit.page.locator(".as-table tbody tr").count() == visit.known(
            "histories[0].column(histories[0].cursor - 1).rows.length"
        )


def test_a_chat_streams_into_the_playground_with_its_tokens_and_its_way_through_the_batch(
    browser: Any, server: Running
) -> None:
    with visiting(browser, server.url) as visit:
        page = visit.page
        visit.until("histories[0]?.facts")
        page.click("#playground-toggle")
        page.click(".settings summary")
        page.fill("#play-max_tokens", "40")
        page.fill("#play-n", "2")
        page.fill("#play-text", HOSTILE)
        page.keyboard.press("Enter")
        visit.until("document.querySelectorAll('.answer .token').length >= 20")
        visit.until_text(".ask .primary", "Send")
        assert page.locator(".answer").count() == 2, "n answers side by side"
        assert page.text_content(".asked") == HOSTILE
        page.locator(".answer .token").first.hover()
        assert page.locator(".alternatives p").count() >= 2
        visit.until_text(".times", "queue")
        assert re.search("[0-9]+ tokens in ", page.text_content(".times"))
        assert page.evaluate("window.broken") is None
        visit.check(host_of(server))


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": [HOSTILE, "Ana"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
}
TOOL = {"type": "function", "function": {"name": "greet", "parameters": SCHEMA, "strict": True}}


@pytest.mark.long
def test_the_playground_answers_by_a_schema_and_with_calls_and_goes_on(browser: Any, server: Running) -> None:
    with visiting(browser, server.url) as visit:
        page = visit.page
        page.click("#playground-toggle")
        page.click(".settings summary")
        page.fill("#play-max_tokens", "300")
        for turn, (form, given) in enumerate((("schema", SCHEMA), ("call", [TOOL]), ("schema", SCHEMA))):
            page.select_option("#play-form", form)
            page.fill("#play-form-text", json.dumps(given))
            page.fill("#play-text", "Who?")
            page.keyboard.press("Enter")
            visit.until(f"document.querySelectorAll('.answer').length === {turn + 1}")
            visit.until_text(".ask .primary", "Send")
            assert page.text_content(".ask .error") == ""
        texts = [each.inner_text() for each in page.locator(".answer .text").all()]
        assert texts[1] == "" and page.evaluate("window.broken") is None
        [name, call] = re.fullmatch(r"(?s)(\w+)\((.*)\)", page.locator(".calls:visible").inner_text()).groups()
        assert name == "greet"
        for text in (texts[0], call, texts[2]):
            assert json.loads(text).keys() == {"name", "age"}, "an answer ends where its grammar does"
        page.locator(".log").focus()
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        assert page.locator(".alternatives").is_visible() and page.locator(".token.chosen").count() == 1
        page.keyboard.press("Escape")
        assert page.locator("#playground").is_hidden()
        assert page.evaluate("document.activeElement.id") == "playground-toggle"
        visit.check(host_of(server))


@pytest.mark.long
def test_the_token_that_ends_an_answer_is_not_shown_as_text(browser: Any, server: Running) -> None:
    with visiting(browser, server.url) as visit:
        page = visit.page
        page.click("#playground-toggle")
        page.click(".settings summary")
        page.select_option("#play-form", "schema")
        page.fill("#play-form-text", '{"const": "🎈 done"}')
        page.click(".ask .primary")
        visit.until("document.querySelectorAll('.answer .token').length > 0")
        visit.until_text(".ask .primary", "Send")
        assert json.loads(page.locator(".answer .text").inner_text()) == "🎈 done"


@pytest.mark.long
def test_the_playgrounds_request_can_be_copied_as_a_command_and_as_a_program(browser: Any, server: Running) -> None:
    with visiting(browser, server.url, permissions=["clipboard-read", "clipboard-write"]) as visit:
        visit.page.click("#playground-toggle")
        visit.page.fill("#play-text", "Who's there?")
        visit.page.wait_for_selector("#play-model option", state="attached")
        visit.page.click("text=Copy as curl")
        visit.until_text(".ask [role=status]", "copied")
        command = visit.page.evaluate("navigator.clipboard.readText()").replace('"max_tokens": 128', '"max_tokens": 3')
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30)
        assert done.stdout.startswith("data: {") and "[DONE]" in done.stdout
        visit.page.click("text=Copy as Python")
        visit.until("navigator.clipboard.readText().then((text) => text.includes('openai'))")
        program = visit.page.evaluate("navigator.clipboard.readText()").replace("max_tokens=128", "max_tokens=3")
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def test_an_error_of_the_playground_is_said_in_the_servers_words(browser: Any, server: Running) -> None:
    with visiting(browser, server.url) as visit:
        visit.page.click("#playground-toggle")
        visit.page.click(".settings summary")
        visit.page.fill("#play-top_p", "7")
        visit.page.click(".ask .primary")
        visit.until_text(".ask .error", "top_p is 7")
        visit.page.select_option("#play-form", "schema")
        visit.page.fill("#play-form-text", "{")
        visit.page.click(".ask .primary")
        visit.until_text(".ask .error", "not JSON")


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.long)])
def test_axe_finds_no_serious_violation(browser: Any, server: Running, scheme: str) -> None:
    with busy(server), visiting(browser, server.url, color_scheme=scheme, reduced_motion="reduce") as visit:
        visit.until("histories[0]?.lookNow()?.queue.length > 0")
        visit.page.click(".as-table summary")
        visit.page.click("#playground-toggle")
        visit.page.click(".settings summary")
        visit.page.fill("#play-text", "Hello")
        visit.page.click(".ask .primary")
        visit.until("document.querySelectorAll('.answer .token').length > 0")
        visit.page.keyboard.press("Escape")
        assert visit.violations() == []


@pytest.mark.long
def test_a_phone_shows_all_of_it_without_scrolling_sideways(browser: Any, server: Running) -> None:
    with busy(server), visiting(browser, server.url) as visit:
        visit.page.set_viewport_size({"width": 390, "height": 844})
        visit.until("histories[0]?.lookNow()?.queue.length > 0")
        assert visit.page.evaluate("document.documentElement.scrollWidth") == 390
        visit.page.click("#playground-toggle")
        assert visit.page.evaluate("document.documentElement.scrollWidth") == 390
        assert visit.violations() == []


@pytest.mark.long
def test_replicas_and_models_of_a_server_are_side_by_side(browser: Any, tiny_model: Path) -> None:
    models = [flag for name in ("small", "large") for flag in ("--model", f"{name}={tiny_model}")]
    with running(*models, "--replicas", "2", fake=True) as server, visiting(browser, server.url) as visit:
        for name in ("small", "large"):
            server.post("/v1/completions", {**BODY, "model": name})
        visit.until("histories.length === 4 && histories.some((each) => each.cursor > 20)")
        assert visit.page.locator("canvas.lanes").count() == visit.page.locator("canvas.map").count() == 4
        names = set(visit.page.locator(".engine h3").all_inner_texts())
        assert names == {f"{name} · replica {number}" for name in ("small", "large") for number in (0, 1)}
        first, second = (visit.page.locator(".engine").nth(place).bounding_box() for place in (0, 1))
        assert first["y"] == second["y"] and first["x"] < second["x"]
        visit.check(host_of(server))


# ---- keys


@pytest.mark.long
def test_with_keys_the_page_asks_for_one_and_never_writes_it_into_an_address(
    browser: Any, tiny_model: Path, tmp_path: Path
) -> None:
    keys = keys_file(tmp_path, alice="")
    with running(tiny_model, "--api-keys", keys, fake=True) as server, visiting(browser, server.url) as visit:
        visit.page.wait_for_selector("#signin", state="visible")
        assert visit.violations() == []
        for key, told in (("sk-wrong-key", "not valid"), ("sk-key-of-alice", "admin")):
            visit.page.fill("#key", key)
            visit.page.keyboard.press("Enter")
            visit.until_text("#signin-error", told)
        visit.page.fill("#key", "sk-key-of-operator")
        visit.page.keyboard.press("Enter")
        visit.until("histories[0]?.facts")
        assert visit.page.text_content("#status span") == "live"
        assert not [url for url in visit.urls if "sk-" in url]
        visit.page.reload()
        visit.until("histories[0]?.facts")  # this tab is still signed in


# ---- recordings


def hostile_recording(file: Path) -> Path:
    """A recording in which every text is markup."""
    lane = [0, HOSTILE, 0, HOSTILE, 20, 16, 0, 1000, 60, 0, 0, 0, 20, HOSTILE]
    queue = [[HOSTILE, 0, HOSTILE, 12, 0, 1.5, 0, 0, [HOSTILE, "It waits."]]]
    blocks = {"blocks": [1, 1, 2], "map": "0125", "every": 1, "tiers": [["host", 1, 2, 8]], "evictions": 0}
    tokens = {"prompt_tokens": 20, "cached_tokens": 16, "prefixes": [[HOSTILE, 16, 2, 1]], "drafts": None}
    waiting = {"running": 1, "waiting": 1, "blocked_by": "rows", "queue": queue, "tenants": [[HOSTILE, 1, 1]]}
    look = {"at": 0, "has_cache": True, "counts": [2, 0, 0, 0, 0, 0]} | blocks | tokens | waiting
    limits = {"max_sequences": 4, "step_tokens": 64, "max_length": 64, "blocks": 4, "block_size": 16, "target_us": None}
    choices = dict.fromkeys(("policy", "batching", "prefill", "preemption"), HOSTILE)
    start = {"at": 0, "lanes": [], "number": 0} | limits | choices
    steps = [[1, 100, 5000, 4, 1, [0], [[0, 16, 4]], 0]] + [[n, 5000 * n, 5000, 1, 1, 0, 0, 0] for n in range(2, 40)]
    events = [["admit", 1, *lane], ["end", 39, 0, HOSTILE, 39, 5100, 200_000]]
    lines = [
        {"kind": "chairlift record", "version": 1, "title": HOSTILE},
        {"model": HOSTILE, "start": start, "look": look},
        {"model": HOSTILE, "steps": steps, "events": events},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def test_markup_in_ids_tenants_and_sentences_stays_text(browser: Any, server: Running, tmp_path: Path) -> None:
    with visiting(browser, server.url) as visit:
        page = visit.page
        visit.until("histories[0]?.facts")
        visit.until_text(".engine h3", "b>")
        page.set_input_files("#file", hostile_recording(tmp_path / "hostile.jsonl"))
        visit.until("player.isRecorded && histories[0].cursor > 20")
        page.click(".as-table summary")
        canvas = page.locator("canvas.lanes")
        canvas.hover(position={"x": canvas.bounding_box()["width"] - 30, "y": 60})
        visit.until("document.querySelector('.as-table tbody tr') !== null")
        for place in ("#title", ".picture .tip", ".as-table tbody", ".waiting", ".tenants", ".cache tbody"):
            assert "<script>" in page.text_content(place), place
        assert page.locator("main img, main script").count() == 0
        assert page.evaluate("window.broken") is None
        visit.check(host_of(server))


def test_a_file_that_is_no_recording_is_named_with_the_reason(browser: Any, server: Running, tmp_path: Path) -> None:
    file = tmp_path / "notes.jsonl"
    with visiting(browser, server.url) as visit:
        for text, told in (("hello", "not JSON"), ('{"kind": "other"}', "--record-view"), ("", "empty")):
            file.write_text(text)
            visit.page.set_input_files("#file", file)
            visit.until_text("#notice", told)
            visit.page.set_input_files("#file", [])


def recording(file: Path, *records: dict[str, Any]) -> Path:
    """A recording of one engine, `m`, with 39 steps of 5 ms, and what is to be in its records besides."""
    lines = [
        json.loads(line) for line in hostile_recording(file).read_text().replace(json.dumps(HOSTILE), '"m"').split("\n")
    ]
    file.write_text("".join(json.dumps(each) + "\n" for each in (*lines, *records)))
    return file


@pytest.mark.long
def test_another_recording_of_an_engine_with_the_same_name_replaces_what_was_shown(
    browser: Any, server: Running, tmp_path: Path
) -> None:
    more = {"model": "m", "steps": [[n, 5000 * n, 5000, 1, 1, 0, 0, 0] for n in range(40, 60)]}
    files = recording(tmp_path / "short.jsonl"), recording(tmp_path / "long.jsonl", more)
    with visiting(browser, server.url) as visit:
        for file, last in zip(files, (39, 59), strict=True):
            visit.page.set_input_files("#file", file)
            visit.until(f"histories[0]?.model === 'm' && histories[0].cursor === {last}")
            visit.until(f"document.querySelector('canvas.lanes').ariaLabel?.includes('step {last}:')")
        assert visit.page.locator("canvas.lanes").count() == visit.page.locator("canvas.map").count() == 1
        assert visit.complaints == []


@pytest.mark.long
def test_a_broken_recording_leaves_what_was_shown_and_one_that_is_cut_off_is_shown_up_to_there(
    browser: Any, server: Running, tmp_path: Path
) -> None:
    whole = recording(tmp_path / "whole.jsonl")
    cut = tmp_path / "cut.jsonl"
    cut.write_text(whole.read_text() + '{"model": "m", "steps": [[40, 2')
    file = tmp_path / "odd.jsonl"
    with visiting(browser, server.url) as visit:
        visit.until_text("#status", "live")
        for text, told in (
            ("null\n", "not a recording"),
            (whole.read_text() + '{"model": "m", "start": {}}\n', "line 4"),
        ):
            file.write_text(text)
            visit.page.set_input_files("#file", file)
            visit.until_text("#notice", told)
            assert visit.page.text_content("#status span") == "live", "the server's run is still shown"
        visit.page.set_input_files("#file", cut)
        visit.until_text("#notice", "ends in the middle")
        visit.until("player.isRecorded && histories[0].cursor === 39")
        assert visit.complaints == []


@pytest.mark.long
def test_the_page_begins_anew_with_an_engine_that_replaces_one(browser: Any, server: Running, tmp_path: Path) -> None:
    file = recording(tmp_path / "two.jsonl")
    head, first, second = map(json.loads, file.read_text().splitlines())
    old = {"model": "m", "start": {**first["start"], "at": 3_600_000_000, "epoch": 1}}
    new = {**first, "start": {**first["start"], "epoch": 2}}
    file.write_text("\n".join(map(json.dumps, (head, old, new, second))))
    with visiting(browser, server.url) as visit:
        visit.page.set_input_files("#file", file)
        visit.until("player.isRecorded && histories[0].cursor === 39")
        assert visit.known("player.length") == 200_000, "the old engine's clock is not the new one's"


@pytest.mark.long
def test_a_recording_that_was_saved_late_begins_with_its_first_step(
    browser: Any, server: Running, tmp_path: Path
) -> None:
    file = recording(tmp_path / "late.jsonl")
    hour = 3_600_000_000
    head, first, second = map(json.loads, file.read_text().splitlines())
    first["start"]["at"] = first["look"]["at"] = hour
    for step in second["steps"]:
        step[1] += hour
    file.write_text("\n".join(map(json.dumps, (head, first, second))))
    with visiting(browser, server.url) as visit:
        visit.page.set_input_files("#file", file)
        visit.until("player.isRecorded && histories[0].cursor === 39")
        visit.until_text("#clock", "0:00.2 of 0:00.2")
        visit.page.fill("#position", "500")
        assert 10 < visit.known("histories[0].cursor") < 30


@pytest.mark.long
def test_the_pointer_tells_the_step_that_is_drawn_there_at_any_zoom_of_the_browser(
    browser: Any, server: Running, tmp_path: Path
) -> None:
    steps = [[n, 5000 * n, 5000, 1, 1, 0, 0, 0] for n in range(40, 240)]
    file = recording(tmp_path / "run.jsonl", {"model": "m", "steps": steps})
    with visiting(browser, server.url, device_scale_factor=1.1) as visit:
        visit.page.set_input_files("#file", file)
        visit.until("player.isRecorded && histories[0].cursor === 239")
        canvas = visit.page.locator("canvas.lanes")
        # 150 columns of 4 pixels of the screen each, 1.1 of which are one of the page's; half a column more
        canvas.hover(position={"x": canvas.bounding_box()["width"] - 150.5 * 4 / 1.1, "y": 100})
        visit.until_text(".picture .tip strong", "step 89")


@pytest.mark.long
def test_numbers_and_small_charts_at_their_edges(browser: Any, server: Running) -> None:
    with visiting(browser, server.url) as visit:
        known = visit.page.evaluate(
            """async () => {
              const { clock, duration } = await import("/ui/format.js");
              const { History } = await import("/ui/history.js");
              const history = new History("m", null, true);
              for (let place = 0; place < 2000; place++) history.look({ at: place * 500_000 });
              history.now = 100e6;
              const ats = history.looksWithin(10).map((each) => each.at / 1e6);
              return [duration(119.7e6), clock(59.97e6), clock(3599.99e6), ats];
            }"""
        )
        assert known[:3] == ["2 min 0 s", "1:00.0", "1:00:00.0"]
        assert known[3] == [90.5 + place / 2 for place in range(20)]


@pytest.mark.long
def test_the_playgrounds_request_can_be_copied_from_a_page_without_https(browser: Any, server: Running) -> None:
    with visiting(browser, server.url) as visit:
        visit.until("histories[0]?.facts")
        visit.page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
        visit.page.click("#playground-toggle")
        visit.page.evaluate("document.addEventListener('copy', () => (window.copied = getSelection().toString()))")
        visit.page.get_by_text("Copy as curl").click()
        visit.until_text("#playground [role=status]", "copied")
        assert "not copied" not in visit.page.text_content("#playground [role=status]")
        assert visit.page.evaluate("window.copied").startswith("curl -N http://127.0.0.1")
        assert visit.complaints == []


@contextmanager
def viewing(file: Path) -> Iterator[str]:
    """`chairlift view` of a file: its address."""
    command = [sys.executable, "-m", "chairlift", "view", str(file), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            yield next(word for line in process.stderr for word in line.split() if word.startswith("http"))
        finally:
            process.terminate()


@pytest.mark.long
def test_a_simulated_run_opens_in_the_same_page_with_its_replicas_side_by_side(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    command = ["simulate", "uniform", "--requests", "60", "--rate", "30", "--replicas", "2", "--record-view", str(file)]
    subprocess.run([sys.executable, "-m", "chairlift", *command], check=True, capture_output=True, timeout=120)
    with viewing(file) as url, visiting(browser, url) as visit:
        visit.until("histories.length === 2 && player.time > 0.5e6")
        visit.until("histories.every((each) => each.cursor > 3)")
        assert visit.page.locator("canvas.lanes").count() == 2
        assert {"prefill", "decode"} <= painted(visit)
        assert "simulated" in visit.page.text_content("#title")
        visit.page.fill("#position", "900")
        assert visit.known("player.time / player.length") > 0.85
        assert visit.page.locator("#playground-toggle").is_hidden(), "there is no server to chat with"
        assert visit.violations() == []
        visit.check(urlsplit(url).netloc)


@pytest.mark.long
def test_a_live_run_can_be_saved_and_opened_again(browser: Any, server: Running, tmp_path: Path) -> None:
    with busy(server), visiting(browser, server.url) as visit:
        visit.until("histories[0]?.cursor > 100")
        with visit.page.expect_download() as download:
            visit.page.click("#save")
        download.value.save_as(tmp_path / "saved.jsonl")
        visit.page.set_input_files("#file", tmp_path / "saved.jsonl")
        visit.until("player.isRecorded && histories[0].columns.length >= 100")
        visit.check(host_of(server))
