"""Floating point operations of training, counted in matrix products: 2 for each multiply-add."""

from __future__ import annotations

from typing import NamedTuple

from reanchor_jax.config import DrafterConfig, LayerConfig, TargetConfig


class StepSizes(NamedTuple):
    """Of a step."""

    rows: int  # R texts
    anchors: int  # K blocks of each
    length: int  # S tokens of each, padding included
    vocab: int  # V' tokens that are scored


def token_macs(layer: LayerConfig) -> int:
    """Multiply-adds with the weights of one layer for one token: q, o; k, v (or one for both); gate, up, down."""
    width, queries, keys = layer.hidden_size, layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    return 2 * width * queries + (2 - layer.shared_kv) * width * keys + 3 * width * layer.intermediate_size


def step_flops(config: DrafterConfig, sizes: StepSizes) -> int:
    """Floating point operations of the matrix products of a train step of DFlash's head; 2 per multiply-add.

    Forward, of n = R*K*B block tokens and c = R*S context tokens, D being the width, C the taps, Q
    and k the widths of all queries and of all keys:

        layers     n * L * (2 D Q + 2 D k + 3 D F)      the weights, for block tokens
        attention  n * L * 2 Q (S + B)                  scores and values, masked ones too
        context    c * L * 2 D k                        keys and values of the features
        fc         c * C D * D
        head       R*K*(B-1) * D V'

    Backward, a product with a trained weight has two of its size, for the gradients of its input
    and of the weight; so has one of attention, for both its factors. But `fc` has no gradient for
    its input, and the head none for its rows, which are frozen. In all: 3 (layers + attention +
    context) + 2 (fc + head). What the loss adds to fill its last chunk of drafts is not counted.
    """
    layer, slots = config.layer, config.num_slots
    width, queries, keys = layer.hidden_size, layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    blocks, context = sizes.rows * sizes.anchors, sizes.rows * sizes.length
    block_macs = blocks * slots * (token_macs(layer) + 2 * queries * (sizes.length + slots))
    context_macs = context * 2 * width * keys
    fc = context * len(config.target_layer_ids) * width * width
    head = blocks * (config.block_size - 1) * width * sizes.vocab
    return 2 * (3 * config.num_layers * (block_macs + context_macs) + 2 * (fc + head))


def features_flops(config: TargetConfig, sizes: StepSizes) -> int:
    """The same of the target's forward over R texts, all products of its attention included; no logits."""
    macs = [token_macs(layer) + 2 * layer.num_heads * layer.head_dim * sizes.length for layer in config.pattern]
    return 2 * sizes.rows * sizes.length * sum(macs) * (config.num_layers // len(config.pattern))
