"""Tensor parallelism: where each weight lies on a mesh. XLA places everything else from there.

    from jax.sharding import AxisType

    mesh = jax.make_mesh((3,), ("model",), axis_types=(AxisType.Auto,))
    pair = shard_pair(load_pair("smollm2-135m"), mesh)  # 9 heads, 3 key/value heads

`generate` and its parts need no other change. Sequences are spread by `vmap` over prompts that
lie along another mesh axis:

    mesh = jax.make_mesh((2, 3), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    prompts = jax.device_put(prompts, NamedSharding(mesh, PartitionSpec("data")))
"""

from __future__ import annotations

from typing import TypeVar

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from reanchor_jax.config import LayerConfig, LMHeadConfig
from reanchor_jax.drafter import Drafter
from reanchor_jax.errors import ReanchorError
from reanchor_jax.pair import Pair
from reanchor_jax.target import Target

Network = TypeVar("Network", Target, Drafter)

SPLIT_AXIS = {
    "q_proj": 1,  # [L, out, in] by whole heads, so that attention stays on one device
    "k_proj": 1,
    "v_proj": 1,
    "o_proj": 2,  # its product sums over devices: the one all-reduce of attention
    "gate_proj": 1,
    "up_proj": 1,
    "down_proj": 2,  # and that of the MLP
    "embedding": 0,  # [V, D]
    "lm_head": 0,
    "proj_out": 0,  # Domino's correction [V, E]
    "markov_in": 0,  # DSpark's [V, r]
    "markov_out": 0,
}
"""The axis of each weight that is split; all other weights are whole on every device."""


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
    if axis not in mesh.shape:
        raise ReanchorError(f"mesh axis {axis!r} does not exist; expected one of {tuple(mesh.shape)}")
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ReanchorError(f"mesh axes are {mesh.axis_types}; make the mesh with axis_types=AxisType.Auto for each")
    drafter = None if pair.drafter is None else _shard(pair.drafter, mesh, axis)
    return Pair(_shard(pair.target, mesh, axis), drafter)


def _shard(network: Network, mesh: Mesh, axis: str) -> Network:
    _check_divides(network.config.layer, network.config.vocab_size, mesh.shape[axis])
    if isinstance(network, Drafter) and isinstance(network.config.head, LMHeadConfig):
        _check_divides(network.config.layer, network.config.head.draft_vocab_size or 0, mesh.shape[axis])

    def place(path: tuple, leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.Array | jax.ShapeDtypeStruct:
        names = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        split = next((SPLIT_AXIS[name] for name in names if name in SPLIT_AXIS), None)
        spec = PartitionSpec(*(axis if i == split else None for i in range(leaf.ndim)))
        sharding = NamedSharding(mesh, spec)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.device_put(leaf, sharding)

    return jax.tree_util.tree_map_with_path(place, network)


def _check_divides(layer: LayerConfig, vocab_size: int, num_devices: int) -> None:
    for name, size in (
        ("num_heads", layer.num_heads),
        ("num_kv_heads", layer.num_kv_heads),
        ("intermediate_size", layer.intermediate_size),
        ("vocab_size", vocab_size),
    ):
        if size % num_devices:
            raise ReanchorError(f"{name} is {size}; expected a multiple of the {num_devices} devices to shard over")
