"""Heads: what turns the features of drafted blocks into tokens.

A drafter is a backbone, which all kinds share, and a head. Another kind of drafter is another
head: one file here, one config in `reanchor_jax.config`, one entry in `HEADS`.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from reanchor_jax.config import DominoConfig, DrafterConfig, DSparkConfig, LMHeadConfig
from reanchor_jax.heads.domino import DominoHead
from reanchor_jax.heads.dspark import DSparkHead
from reanchor_jax.heads.head import DraftNoise as DraftNoise
from reanchor_jax.heads.head import Drafts as Drafts
from reanchor_jax.heads.head import Forced as Forced
from reanchor_jax.heads.head import Head as Head
from reanchor_jax.heads.lm import LMHead

HEADS: dict[type, type[Head]] = {LMHeadConfig: LMHead, DominoConfig: DominoHead, DSparkConfig: DSparkHead}
"""Kind of a head's config: the head."""


def make_head(config: DrafterConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> Head:
    """The head that the config asks for, with random weights."""
    return HEADS[type(config.head)](config, dtype=dtype, rngs=rngs)
