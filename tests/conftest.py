"""A hostile environment for every test: 8 host devices, strict promotion, no implicit rank changes."""

import os
import signal
from pathlib import Path

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"

import jax
import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background jobs, and in all that they start
    signal.signal(signal.SIGINT, signal.default_int_handler)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True)
def few_programs():
    """Forgets compiled programs before they fill the process: each holds memory maps, of which Linux
    allows 65,530, and the compiler crashes where it gets no more. One test adds up to 4,000 of them."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()


@pytest.fixture(scope="module")
def quick_compiles():
    """Half the compile time, same arithmetic; a whole module, so that its programs agree bit for bit."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
