"""Training over a mesh: texts of a step along its axis `data`, weights and moments along its axis `model`.

    with jax.set_mesh(make_mesh(MeshShape(data=4, model=2))):
        train(target, start, ...)

The mesh is JAX's own context, so nothing passes it on: what is split is said here and in
`placement`, XLA derives the rest. Without a mesh every function here is the identity.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple, TypeVar

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from reanchor_jax.drafter import Drafter
from reanchor_jax.errors import ReanchorError
from reanchor_jax.placement import Network, place, split_spec

DATA, MODEL = "data", "model"
T = TypeVar("T")


class MeshShape(NamedTuple):
    """Devices along each axis."""

    data: int
    model: int


def mesh_shape(text: str) -> MeshShape:
    """argparse type of DATAxMODEL, such as 4x2."""
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() and len(part) < 7 for part in parts):
        raise argparse.ArgumentTypeError(f"got {text!r:.60}, expected DATAxMODEL, such as 4x2")
    shape = MeshShape(*map(int, parts))
    if 0 in shape:
        raise argparse.ArgumentTypeError(f"got {text!r:.60}, expected at least one device along each axis")
    return shape


def make_mesh(shape: MeshShape) -> Mesh:
    """A mesh of the first devices.

    Raises:
      ReanchorError: there are not so many.
    """
    devices, needed = jax.devices(), shape.data * shape.model
    if needed > len(devices):
        raise ReanchorError(
            f"--mesh is {shape.data}x{shape.model}, {needed} devices; expected at most the {len(devices)} there are"
        )
    return jax.make_mesh(tuple(shape), (DATA, MODEL), axis_types=(AxisType.Auto,) * 2, devices=devices[:needed])


def check_rows(num_rows: int, num_parts: int, flag: str = "--rows") -> None:
    """Raises ReanchorError where texts cannot be split evenly."""
    if num_rows % num_parts:
        raise ReanchorError(
            f"{flag} is {num_rows}; expected a multiple of {num_parts}, the devices that --mesh splits texts over"
        )


def num_data_parts() -> int:
    """Parts that texts are split into; also while a function is traced, for which it is a constant."""
    return jax.sharding.get_abstract_mesh().shape.get(DATA, 1)


def place_network(network: Network) -> Network:
    """The network with its weights laid over the axis `model`; raises as `shard_pair` does."""
    mesh = jax.sharding.get_mesh()
    return network if mesh.empty else place(network, mesh, MODEL)


def split_texts(tree: T) -> T:
    """Arrays [R, ...], their rows laid over the axis `data`."""
    mesh = jax.sharding.get_mesh()
    return tree if mesh.empty else jax.device_put(tree, NamedSharding(mesh, PartitionSpec(DATA)))


def keep_split(tree: T, drafter: Drafter) -> T:
    """In a jitted function: a tree of the drafter's parameters or moments, split as `place_network` splits those.

    A moment's path ends as its parameter's: `mu.layers.q_proj` is split as `layers.q_proj`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return tree

    def keep(path: Any, leaf: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(leaf, split_spec(drafter, path, leaf.ndim, MODEL, mesh.shape[MODEL]))

    return jax.tree_util.tree_map_with_path(keep, tree)
