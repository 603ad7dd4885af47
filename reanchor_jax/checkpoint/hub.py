"""Where a checkpoint is: a local folder or file, or a repository of the Hugging Face hub."""

from __future__ import annotations

import errno
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

    Whatever exists locally is used as it is, without any network access. An id is looked up on the
    hub, and only files that its cache lacks are fetched; without a network, or with `HF_HUB_OFFLINE=1`,
    the cache must hold all of them. The cache is huggingface_hub's, in `HF_HUB_CACHE` or `HF_HOME`;
    a token comes from `hf auth login` or `HF_TOKEN`.

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


def commit_of(path: Path) -> str | None:
    """The commit of a folder in the hub's cache, models--org--name/snapshots/COMMIT; None for other paths."""
    in_cache = path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--")
    return path.name if in_cache else None


def _download(repository: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=_PATTERNS))
    except Exception as error:  # network, permissions, disk, cache: the client raises many kinds
        remedy = _remedy(error, repository, revision)
        raise ReanchorError(f"{repository} is no local folder and cannot be fetched from the hub: {remedy}") from None


def _remedy(error: Exception, repository: str, revision: str | None) -> str:
    """What is wrong and what to do about it, for the kinds of failure that people meet."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{repository}"
    log_in = "log in with `hf auth login` or set HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        return f"it is gated; accept its licence on {page}, then {log_in}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"there is no such repository, or it is private; check the name on {page}, or {log_in}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"it has no revision {revision!r}; check the branch, tag or commit on {page}/commits"
    wanted = f"{repository} at revision {revision!r}" if revision else repository
    cache = f"the cache {constants.HF_HUB_CACHE} holds no complete {wanted}"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        if constants.HF_HUB_OFFLINE:
            return f"HF_HUB_OFFLINE is set and {cache}; unset it to fetch, or pass the folder"
        return f"the hub cannot be reached and {cache}; check the network, or fetch it elsewhere and pass the folder"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
        return (
            f"{error.filename or constants.HF_HUB_CACHE} cannot be written ({error.strerror}); free space, "
            "or set HF_HOME to another folder"
        )
    reason = " ".join(str(error).split())[:160]
    return f"{type(error).__name__}: {reason}; fetch it where there is a network and pass the folder"
