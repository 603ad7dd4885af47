"""Where a checkpoint is: a local folder or file, or a repository of the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from reanchor_jax.errors import ReanchorError

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
MASK_EMBEDDING_FILE = "mask_embedding.pt"
_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model", MASK_EMBEDDING_FILE]
"""Configs, weights and tokenizer files: never code. The one pickle is never opened: fetched, it is
seen that a drafter has one, and that loading the rest alone would be wrong."""


def resolve(source: str | Path, revision: str | None = None) -> Path:
    """The local folder or file of a checkpoint; fetches it from the hub where it is an id.

    Whatever exists locally is used as it is, without any network access. `HF_HUB_OFFLINE=1`
    restricts ids to what the hub's cache holds.

    Args:
      source: a folder, a GGUF file, or an id like `org/name`.
      revision: branch, tag or commit of an id.

    Raises:
      ReanchorError: there is no such thing, or it cannot be fetched.
    """
    path = find_local(source)
    if path is not None:
        if revision is not None:
            raise ReanchorError(f"{source} is a local path; expected no revision with it, which is for hub ids")
        return path
    if isinstance(source, Path) or not _REPOSITORY.fullmatch(source) or ".." in source:
        raise ReanchorError(
            f"{str(source)!r} does not exist; expected a checkpoint folder, a GGUF file or a hub id org/name"
        )
    return _download(source, revision)


def find_local(source: str | Path) -> Path | None:
    """The path of a source that exists on this machine, else None; raises as `resolve`."""
    try:
        path = Path(source).expanduser()
        return path if source != "" and path.exists() else None
    except (OSError, RuntimeError) as error:  # a name that is too long, a home that is not there
        raise ReanchorError(
            f"{str(source)[:80]!r} cannot be opened: {str(error)[:80]}; expected a path or a hub id"
        ) from None


def _download(repository: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=_PATTERNS))
    except Exception as error:  # network, permissions, disk, cache: the client raises many kinds
        reason = " ".join(str(error).split())[:160]
        raise ReanchorError(
            f"{repository} is no local folder and cannot be fetched from the hub ({type(error).__name__}: {reason}); "
            "fetch it where there is a network and pass the folder"
        ) from None
