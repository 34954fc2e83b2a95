"""Download of models from the Hugging Face hub, with one-line errors."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chairlift.core.errors import ModelError

WANTED = ["*.json", "*.safetensors", "*.jinja", "*.tiktoken", "tokenizer.model", "merges.txt"]
# Subfolders hold other formats of the same weights, consolidated files the same weights under other names.
UNWANTED = ["*/*", "consolidated*"]


def fetch(repo: str, file: str | None = None, *, progress: bool = True) -> Path:
    """Return the local folder of a repository, or one file of it, downloading what the hub's cache lacks."""
    # Imported late: the import takes longer than finding most models.
    from huggingface_hub import hf_hub_download, snapshot_download

    with _bars(progress), _plain_errors(repo, file):
        if file is not None:
            return Path(hf_hub_download(repo, file))
        folder = Path(snapshot_download(repo, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{repo} on the Hugging Face hub holds no safetensors{_gguf_advice(repo)}")
    return folder


def _gguf_advice(repo: str) -> str:
    from huggingface_hub import list_repo_files

    with _plain_errors(repo, None):
        files = [file for file in list_repo_files(repo) if file.endswith(".gguf")]
    return f", but GGUF files: name one, as {repo}:{files[0]}" if files else ": look for the model in that format"


@contextmanager
def _bars(progress: bool) -> Iterator[None]:
    """Show the hub's progress bars only on a terminal."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled() or (progress and sys.stderr.isatty()):
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def _plain_errors(repo: str, file: str | None) -> Iterator[None]:
    """Convert the hub client's exceptions to a ModelError with a remedy."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as problem:
        raise ModelError(
            f"{repo} is gated: accept its terms at https://huggingface.co/{repo}, then set HF_TOKEN to your token"
        ) from problem
    except errors.RepositoryNotFoundError as problem:
        raise ModelError(
            f"{repo} is not on the Hugging Face hub, or is private: check the spelling, or set HF_TOKEN"
        ) from problem
    except errors.LocalEntryNotFoundError as problem:
        if isinstance(problem.__cause__, errors.OfflineModeIsEnabled):
            raise ModelError(f"{repo} is not in the local cache and HF_HUB_OFFLINE is set: unset it once") from problem
        raise ModelError(
            f"{repo} is not in the local cache and the Hugging Face hub cannot be reached: check the connection"
        ) from problem
    except errors.EntryNotFoundError as problem:
        raise ModelError(f"{repo} on the Hugging Face hub has no file {file}: check the spelling") from problem
    except errors.HFValidationError as problem:
        raise ModelError(f"{repo} is not a name the Hugging Face hub can have: expected org/name") from problem
    except Exception as problem:
        # Errors of its HTTP client, which differ between versions, a full disk, a server error.
        reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        raise ModelError(f"{repo} cannot be fetched from the Hugging Face hub: {reason}; try again") from problem
