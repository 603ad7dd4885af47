"""Which networks a study is of: the pair, other drafters for its target, and what tells them apart."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.study.settings import Setting
from reanchor_jax import Pair, ReanchorError, check_pair, load_pair
from reanchor_jax.checkpoint import load_drafter
from reanchor_jax.default_pair import DEFAULT_PAIR, drafter_source
from reanchor_jax.drafter import Drafter, with_block_size
from reanchor_jax.tokenizer import ChatTokenizer, load_tokenizer


@dataclasses.dataclass(frozen=True)
class Networks:
    """A target with one or more drafters."""

    pair: Pair
    variants: dict[str, Drafter]
    tokenizer: ChatTokenizer | None

    @property
    def drafter(self) -> Drafter:
        assert self.pair.drafter is not None
        return self.pair.drafter

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """What ends a text: ids that the config or the tokenizer names; -1, which matches nothing, without any."""
        own = () if self.tokenizer is None else self.tokenizer.eos_ids
        return tuple(sorted({*self.pair.target.config.eos_token_ids, *own})) or (-1,)

    def of(self, setting: Setting) -> Pair:
        """The pair of a setting; of plain decoding the target alone."""
        if setting.config.method == "ar":
            return Pair(self.pair.target, None)
        drafter = self.variants[setting.drafter] if setting.drafter else self.drafter
        if setting.block_size is not None:
            drafter = with_block_size(drafter, setting.block_size)
        return Pair(self.pair.target, drafter)


def load_networks(pair: str, variants: dict[str, str], dtype: jnp.dtype) -> Networks:
    """Loads everything.

    Args:
      pair: TARGET,DRAFTER (hub ids, folders, a GGUF target), the default pair's name, or a folder
        with `target` and `drafter` as the tiny pair's recipe writes it.
      variants: drafters for the same target, by name.
      dtype: of all weights.

    Raises:
      ReanchorError: something is missing or does not fit.
    """
    target, _, drafter = pair.partition(",")
    if not drafter and all((Path(pair) / part).is_dir() for part in ("target", "drafter")):
        target, drafter = str(Path(pair) / "target"), str(Path(pair) / "drafter")
    if not drafter and target != DEFAULT_PAIR:
        raise ReanchorError(
            f"--pair is {pair}; expected TARGET,DRAFTER, {DEFAULT_PAIR}, or a folder with target and drafter"
        )
    loaded = load_pair(target, drafter or None, dtype=dtype)
    others = {name: load_drafter(drafter_source(source), dtype=dtype) for name, source in variants.items()}
    for other in others.values():
        check_pair(loaded.target, other)
    return Networks(loaded, others, load_tokenizer(target))


def fingerprint(network: Any) -> str:
    """Tells two networks apart: 12 hex digits of their config and up to 4,096 numbers of each array."""
    sha = hashlib.sha256(repr(network.config).encode())
    for leaf in jax.tree.leaves(network):
        flat = leaf.reshape(-1)
        sha.update(np.asarray(flat[:: max(1, flat.size // 4096)]).tobytes())
    return sha.hexdigest()[:12]
