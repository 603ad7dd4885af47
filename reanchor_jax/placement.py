"""Where each weight lies on a mesh: which axis is split, and whether the mesh divides it."""

from __future__ import annotations

from typing import TypeVar

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from reanchor_jax.config import LayerConfig, LMHeadConfig
from reanchor_jax.drafter import Drafter
from reanchor_jax.errors import ReanchorError
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


def split_axis(path: str) -> int | None:
    """The axis that a parameter is split along, by its dotted path; None: it stays whole."""
    return next((SPLIT_AXIS[name] for name in path.split(".") if name in SPLIT_AXIS), None)


def place(network: Network, mesh: Mesh, axis: str) -> Network:
    """The network with its weights laid over a mesh axis; see `sharding.shard_pair`."""
    if axis not in mesh.shape:
        raise ReanchorError(f"mesh axis {axis!r} does not exist; expected one of {tuple(mesh.shape)}")
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ReanchorError(f"mesh axes are {mesh.axis_types}; make the mesh with axis_types=AxisType.Auto for each")
    check_divides(network, mesh.shape[axis])

    def lay(path: tuple, leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.Array | jax.ShapeDtypeStruct:
        split = split_axis(jax.tree_util.keystr(path, simple=True, separator="."))
        spec = PartitionSpec(*(axis if i == split else None for i in range(leaf.ndim)))
        sharding = NamedSharding(mesh, spec)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.device_put(leaf, sharding)

    return jax.tree_util.tree_map_with_path(lay, network)


def check_divides(network: Target | Drafter, num_devices: int) -> None:
    """Raises ReanchorError where heads, MLP width or vocabulary cannot be split over so many devices."""
    _check_sizes(network.config.layer, network.config.vocab_size, num_devices)
    if isinstance(network, Drafter) and isinstance(network.config.head, LMHeadConfig):
        _check_sizes(network.config.layer, network.config.head.draft_vocab_size or 0, num_devices)


def _check_sizes(layer: LayerConfig, vocab_size: int, num_devices: int) -> None:
    for name, size in (
        ("num_heads", layer.num_heads),
        ("num_kv_heads", layer.num_kv_heads),
        ("intermediate_size", layer.intermediate_size),
        ("vocab_size", vocab_size),
    ):
        if size % num_devices:
            raise ReanchorError(f"{name} is {size}; expected a multiple of the {num_devices} devices to shard over")
