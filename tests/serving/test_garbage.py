"""Full garbage collections: none may look at all that a serving process has loaded."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from running import FAKE, _lines_up_to

from chairlift.engine.garbage import freeze_loaded, no_full_collections
from chairlift.serving.beat import Beat
from chairlift.serving.engine_process import EngineLoop, Job
from chairlift.serving.messages import Hello


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    usual = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*usual)


def test_what_is_loaded_is_left_out_of_later_collections() -> None:
    freeze_loaded()
    assert gc.get_freeze_count() > 10_000
    assert len(gc.get_objects()) < 1_000


def test_full_collections_can_be_held_back_for_a_while() -> None:
    before = gc.get_threshold()
    with no_full_collections():
        assert gc.get_threshold()[2] > 1_000_000
    assert gc.get_threshold() == before


def test_an_idle_engine_freezes_what_it_has_once_after_each_time_it_has_run() -> None:
    engine = SimpleNamespace(has_work=False, fault=None, on_step=None)
    job = Job("m", {}, [], Beat().descriptor, os.getpid())
    loop = EngineLoop(engine, Hello("m", "", "", 1, 1, 1, 1, 1, 1, "", []), job, 0.0)  # type: ignore[arg-type]
    loop._collect_garbage(1.0)
    frozen = gc.get_freeze_count()
    assert frozen > 10_000
    gc.unfreeze()
    loop._collect_garbage(2.0)
    assert gc.get_freeze_count() == 0, "nothing has run since"
    loop._has_run, engine.has_work = True, True
    loop._collect_garbage(3.0)
    assert gc.get_freeze_count() == 0, "live requests must not be frozen: their cycles would never be freed"


def test_an_http_process_has_frozen_what_it_loaded_before_it_serves(tiny_model: Path) -> None:
    start = (
        "import gc, json, signal, sys, chairlift.serving.supervisor as s; s.ENGINE = json.loads(sys.argv.pop(1)); "
        "signal.signal(signal.SIGUSR1, lambda *_: print('frozen', gc.get_freeze_count(), file=sys.stderr, flush=True));"
        "from chairlift.cli import main; main()"
    )
    command = [sys.executable, "-c", start, json.dumps(FAKE), "serve", str(tiny_model), "--port", "0"]
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log)
        try:
            _lines_up_to(log, "address", process)
            found: list[str] = []
            while not found and process.poll() is None:
                process.send_signal(signal.SIGUSR1)
                time.sleep(0.05)
                # Not through `log`: the server writes where that one was read last.
                lines = Path(log.name).read_text().splitlines()
                found = [line for line in lines if line.startswith("frozen") and line != "frozen 0"]
            assert int(found[-1].split()[1]) > 10_000
        finally:
            process.terminate()
            process.wait(60)
