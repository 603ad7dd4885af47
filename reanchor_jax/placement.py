"""Where each weight lies on a mesh: which axis is split, and whether the mesh divides it."""

from __future__ import annotations

from typing import TypeVar

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from reanchor_jax.config import DrafterConfig, LMHeadConfig, TargetConfig
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


def split_axis(network: Target | Drafter, path: str, num_devices: int) -> int | None:
    """The axis that a parameter is split along, by its dotted path; None: it stays whole.

    Fewer key/value heads than devices stay whole on each: Gemma 4's full attention layers have one.
    Paths are those of `checkpoint.fill.named_parameters`: `layers.0.k_proj` is of the first layer
    of a target's pattern, `layers.k_proj` of a drafter's layers.
    """
    names = path.split(".")
    name = next((name for name in names if name in SPLIT_AXIS), None)
    if name in ("k_proj", "v_proj"):
        config = network.config
        layer = config.pattern[int(names[1])] if isinstance(config, TargetConfig) else config.layer
        if layer.num_kv_heads < num_devices:
            return None
    return None if name is None else SPLIT_AXIS[name]


def split_spec(network: Target | Drafter, path: tuple, ndim: int, axis: str, num_devices: int) -> PartitionSpec:
    """How a parameter lies on a mesh, by its key path, or an array whose path ends as a parameter's."""
    split = split_axis(network, jax.tree_util.keystr(path, simple=True, separator="."), num_devices)
    return PartitionSpec(*(axis if i == split else None for i in range(ndim)))


def place(network: Network, mesh: Mesh, axis: str) -> Network:
    """The network with its weights laid over a mesh axis; see `sharding.shard_pair`."""
    if axis not in mesh.shape:
        raise ReanchorError(f"mesh axis {axis!r} does not exist; expected one of {tuple(mesh.shape)}")
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ReanchorError(f"mesh axes are {mesh.axis_types}; make the mesh with axis_types=AxisType.Auto for each")
    check_divides(network, mesh.shape[axis])

    def lay(path: tuple, leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.Array | jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, split_spec(network, path, leaf.ndim, axis, mesh.shape[axis]))
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.device_put(leaf, sharding)

    return jax.tree_util.tree_map_with_path(lay, network)


def check_divides(network: Target | Drafter, num_devices: int) -> None:
    """Raises ReanchorError where heads, MLP width or vocabulary cannot be split over so many devices."""
    config = network.config
    layers = config.pattern if isinstance(config, TargetConfig) else (config.layer,)
    sizes = [("vocab_size", config.vocab_size)]
    if isinstance(config, DrafterConfig) and isinstance(config.head, LMHeadConfig):
        sizes.append(("draft_vocab_size", config.head.draft_vocab_size or 0))
    for layer in layers:
        sizes += [("num_heads", layer.num_heads), ("intermediate_size", layer.intermediate_size)]
        if num_devices % layer.num_kv_heads:  # else each device has whole groups of query heads
            sizes.append(("num_kv_heads", layer.num_kv_heads))
    for name, size in sizes:
        if size % num_devices:
            expected = "a divisor or a multiple" if name == "num_kv_heads" else "a multiple"
            raise ReanchorError(f"{name} is {size}; expected {expected} of the {num_devices} devices to shard over")
