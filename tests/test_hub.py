"""Hub ids: the cache is honoured, offline is offline, and every failure says what to do."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from convert.__main__ import main as convert
from reanchor_jax.checkpoint import load_target
from reanchor_jax.checkpoint.hub import commit_of, resolve
from reanchor_jax.checkpoint.manifest import read_manifest
from reanchor_jax.tokenizer import load_tokenizer
from tests.checkpoint_folders import refuses, target_config, target_tensors, write_sharded

CONFIG = target_config("qwen3")
COMMIT, OLD = "5" * 40, "0" * 40


@pytest.fixture
def no_network(monkeypatch):
    """Whoever connects fails, as without a network; attempts are counted."""
    attempts = []

    def refuse(*args, **kwargs):
        attempts.append(args)
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return attempts


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A cache as the hub's client lays it out: files in blobs, links in snapshots, branches in refs."""
    repository = tmp_path / "hub" / "models--org--name"
    write_sharded(tmp_path / "made", CONFIG, target_tensors(CONFIG))
    for commit, theta in ((COMMIT, 10000.0), (OLD, 20000.0)):
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for path in (tmp_path / "made").iterdir():
            blob = repository / "blobs" / f"{commit[0]}{path.name}"
            blob.parent.mkdir(exist_ok=True)
            shutil.copy(path, blob)
            if path.name == "config.json":
                blob.write_text(json.dumps(CONFIG | {"rope_theta": theta}))
            (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "refs" / "v1").write_text(OLD)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return repository


@pytest.mark.parametrize(
    ("revision", "commit"),
    [(None, COMMIT), ("main", COMMIT), ("v1", OLD), (OLD, OLD)],
    ids=["none", "main", "tag", "id"],
)
def test_a_cached_snapshot_needs_no_network(cache, no_network, revision, commit):
    path = resolve("org/name", revision)
    assert path == cache / "snapshots" / commit and commit_of(path) == commit
    theta = load_target("org/name", revision=revision).config.layer.rope.theta
    assert theta == {COMMIT: 10000.0, OLD: 20000.0}[commit]
    assert load_tokenizer("org/name", revision) is None
    assert not no_network  # the tests' environment sets HF_HUB_OFFLINE


def test_a_cached_snapshot_converts(cache, no_network, tmp_path):
    """With its revision and commit in the manifest; the tokenizer's links become files."""
    out = tmp_path / "out"
    assert convert(["org/name", "--revision", "v1", "--out", str(out)]) == 0
    manifest = read_manifest(out)
    assert (manifest.source, manifest.revision, manifest.commit) == ("org/name", "v1", OLD)
    assert (out / "config.json").is_file() and not (out / "config.json").is_symlink()
    assert convert(["verify", str(out), "org/name", "--revision", "v1"]) == 0
    assert convert(["verify", str(out), "org/name"]) == 1
    assert not no_network


def test_the_cache_helps_where_the_network_fails(cache, no_network, monkeypatch):
    """Online, but nothing answers."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert resolve("org/name") == cache / "snapshots" / COMMIT
    assert no_network
    line = refuses(
        lambda: resolve("org/other"), "org/other", "the hub cannot be reached and the cache", "check the network"
    )
    assert "HF_HUB_OFFLINE" not in line


def test_offline_without_it(cache, no_network):
    says = ("HF_HUB_OFFLINE is set and the cache", "unset it to fetch, or pass the folder")
    refuses(lambda: resolve("org/other"), "holds no complete org/other", *says)
    refuses(lambda: resolve("org/name", "v2"), "holds no complete org/name at revision 'v2'", *says)
    (cache / "snapshots" / COMMIT / "model-00002-of-00003.safetensors").unlink()
    refuses(lambda: load_target("org/name"), "lacks 1 of 3 shards: model-00002-of-00003.safetensors")
    assert not no_network


def response(code: int) -> Any:
    """What the client's errors carry, of whatever HTTP library it uses."""
    return SimpleNamespace(status_code=code, headers={}, request=None)


FAILURES = {
    "gated": (
        lambda: errors.GatedRepoError("403\nrestricted", response=response(403)),
        (
            "it is gated; accept its licence on https://huggingface.co/org/name, then log in",
            "hf auth login",
            "HF_TOKEN",
        ),
    ),
    "missing": (
        lambda: errors.RepositoryNotFoundError("401\nnot found", response=response(401)),
        ("there is no such repository, or it is private; check the name", "log in"),
    ),
    "revision": (
        lambda: errors.RevisionNotFoundError("404", response=response(404)),
        ("it has no revision 'v9'; check the branch, tag or commit on https://huggingface.co/org/name/commits",),
    ),
    "offline": (lambda: errors.LocalEntryNotFoundError("offline\nmode"), ("HF_HUB_OFFLINE is set and the cache",)),
    "server": (
        lambda: errors.HfHubHTTPError("500 Server Error", response=response(500)),
        ("HfHubHTTPError: 500 Server Error", "pass the folder"),
    ),
    "disk": (
        lambda: OSError(errno.ENOSPC, "No space left on device", "/cache/blob"),
        ("/cache/blob cannot be written (No space left on device); free space, or set HF_HOME",),
    ),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_failures_say_what_to_do(monkeypatch, tmp_path, capsys, kind):
    make, says = FAILURES[kind]

    def snapshot(*args, **kwargs):
        raise make()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    line = refuses(lambda: resolve("org/name", "v9"), "org/name is no local folder and cannot be fetched", *says)
    assert convert(["org/name", "--revision", "v9", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"error: {line}\n"
    assert not list(tmp_path.iterdir())


def test_a_local_folder_wins(cache, no_network, tmp_path, monkeypatch):
    """Even under the name of a repository."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    write_sharded(tmp_path / "org" / "name", CONFIG, target_tensors(CONFIG))
    assert resolve("org/name") == Path("org/name") and commit_of(Path("org/name")) is None
    load_target("org/name")
    assert not no_network
