"""Compiled programs kept on disk, so that a second run of the same size starts at once."""

from __future__ import annotations

import logging
import sys

import jax

from reanchor_jax.default_pair import default_cache_dir

_WORTH_KEEPING = 0.3
"""Seconds of compilation from which a program is stored."""


def use_compile_cache() -> None:
    """Turns JAX's persistent cache on, in this package's cache folder.

    Where the folder cannot be made, one line says so and the run goes on without. JAX's own remarks
    about single entries are not shown: a program that is not found is compiled, nothing else.
    """
    try:
        folder = default_cache_dir() / "xla"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: ~ without a home
        print(f"note: compiled programs are not kept: {error}", file=sys.stderr)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_KEEPING)
    logging.getLogger("jax._src.compiler").setLevel(logging.ERROR)
    logging.getLogger("jax._src.compilation_cache").setLevel(logging.ERROR)
