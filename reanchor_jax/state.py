"""What a decoding run knows between two rounds."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from reanchor_jax.cache import KVCache
from reanchor_jax.sampling import TokenLogprobs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Suffix:
    """Verifier states of the last round that were not committed (paper: h~ and x~).

    Slot s stands at position `i + s`, i the current anchor's position: `features[s]` is h~_{i+s}
    and `tokens[s]` is x~_{i+s+1}, the target's token there. The block of offset d starts from
    `tokens[d-1]` and sees slots below d.
    """

    features: jax.Array  # [B-1, C*D]
    tokens: jax.Array  # [B-1] int32
    count: jax.Array  # () int32, valid slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """State between two rounds. Invariant: `length == prompt_len + generated - 1`, unless the limit is 0.

    Example: prompt of 5 tokens, first token chosen by prefill: length 5, the anchor stands at
    `tokens[5]`, its keys and values are not computed, generated is 1.
    """

    tokens: jax.Array  # [S] int32: prompt, generated tokens, the anchor last; garbage behind
    length: jax.Array  # () int32, i: committed cache slots, and the anchor's position
    prompt_len: jax.Array  # () int32
    limit: jax.Array  # () int32, tokens to generate at most
    eos_ids: jax.Array  # [E] int32; -1 matches nothing
    done: jax.Array  # () bool
    key: jax.Array  # PRNG key of the target's noise
    cache: tuple[KVCache, ...]  # the target's, [R, K, S, H] for each layer of its pattern
    context: KVCache  # the drafter's context keys and values, [L, K, S, H]
    suffix: Suffix
    first_logprobs: TokenLogprobs  # [1, ...] of the token that prefill chose

    @property
    def generated(self) -> jax.Array:
        """() int32 tokens generated so far, clipped at EOS and the limit."""
        return jnp.minimum(self.length - self.prompt_len + 1, self.limit)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundRecord:
    """What happened in one round: statistics and trace. Unused fields cost nothing under jit."""

    blocks: jax.Array  # [A, B] int32 drafted blocks, anchor first
    block_valid: jax.Array  # [A] bool, block 0 is the baseline
    block_lengths: jax.Array  # [A] int32 tokens of each block that the schedule keeps; B without one
    sites: jax.Array  # [A] int32 attachment site t*, -1 where dropped; 0 for the baseline
    trie_tokens: jax.Array  # [N] int32
    trie_parents: jax.Array  # [N] int32, -1 for the anchor
    trie_depths: jax.Array  # [N] int32
    trie_blocks: jax.Array  # [N] int32, block that a node came from
    target_tokens: jax.Array  # [N] int32, the target's token behind each node
    path: jax.Array  # [W] int32 accepted nodes, anchor first; -1 behind
    accepted: jax.Array  # () int32 accepted drafts
    clipped: jax.Array  # () int32 committed tokens cut by EOS or the limit
    num_nodes: jax.Array  # () int32 verified nodes
    num_cut: jax.Array  # () int32 nodes lost to the budget
    num_retained: jax.Array  # () int32 verifier states kept for the next round
    start: jax.Array  # () int32 number of tokens generated before this round
    logprobs: TokenLogprobs  # [W, ...] of the committed tokens

    @property
    def committed(self) -> jax.Array:
        """() int32 accepted drafts and the target's own token, before clipping."""
        return self.accepted + 1

    @property
    def num_offsets(self) -> jax.Array:
        """() int32 shifted blocks drafted."""
        return jnp.sum(self.block_valid, axis=-1, dtype=jnp.int32) - 1
