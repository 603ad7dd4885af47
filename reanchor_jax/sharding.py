"""Tensor parallelism of a pair. XLA places everything else from where the weights lie (`placement.py`).

    from jax.sharding import AxisType

    mesh = jax.make_mesh((3,), ("model",), axis_types=(AxisType.Auto,))
    pair = shard_pair(load_pair("smollm2-135m"), mesh)  # 9 heads, 3 key/value heads
    pair = load_pair("smollm2-135m", mesh=mesh)  # the same; no device holds more than its part at any time

`generate` and its parts need no other change. Sequences are spread by `vmap` over prompts that
lie along another mesh axis:

    mesh = jax.make_mesh((2, 3), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    prompts = jax.device_put(prompts, NamedSharding(mesh, PartitionSpec("data")))
"""

from __future__ import annotations

from jax.sharding import Mesh

from reanchor_jax.pair import Pair
from reanchor_jax.placement import place


def shard_pair(pair: Pair, mesh: Mesh, axis: str = "model") -> Pair:
    """The pair with its weights laid over a mesh axis.

    Args:
      pair: arrays, or `jax.ShapeDtypeStruct`s, which come back with a sharding (for compiling
        ahead of time).
      mesh: a mesh of automatic axes; over axes other than `axis` the weights are repeated.
      axis: name of the axis to split over.

    Returns:
      The same arrays with a sharding each.

    Raises:
      ReanchorError: no such axis, an axis with explicit sharding, or heads, MLP width or vocabulary
        that it does not divide.
    """
    drafter = None if pair.drafter is None else place(pair.drafter, mesh, axis)
    return Pair(place(pair.target, mesh, axis), drafter)
