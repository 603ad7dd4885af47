"""Which parameters of a drafter are trained, and in which dtype they compute."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from reanchor_jax.drafter import Drafter


def is_trained(drafter: Drafter, freeze_backbone: bool) -> Any:
    """For each parameter whether it is trained: not what the head keeps frozen, nor a frozen backbone."""

    def trained(path: Any, _: Any) -> bool:
        name = jax.tree_util.keystr(path, simple=True, separator=".")  # head.lm_head, layers.q_proj, ..
        if not name.startswith("head."):
            return not freeze_backbone
        return name.split(".")[1] not in drafter.head.frozen

    return jax.tree_util.tree_map_with_path(trained, drafter)


def freeze(drafter: Drafter, freeze_backbone: bool) -> Drafter:
    """The same drafter, through which gradients reach trained parameters alone."""
    trained = is_trained(drafter, freeze_backbone)
    return jax.tree.map(lambda x, t: x if t else jax.lax.stop_gradient(x), drafter, trained)


def computing(drafter: Drafter, dtype: jnp.dtype) -> Drafter:
    """The drafter as it computes: in `dtype`, which is the target's.

    What is trained stays float32. A gradient through this function has been computed in `dtype` and
    is float32 again, since an update may be smaller than bfloat16 can add to a weight. Logits and
    losses are float32 in either dtype, as in decoding.
    """
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, drafter)
