"""Stages 6 and 7 of a round: write what was accepted, keep what was rejected."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from reanchor_jax.accept import Accepted
from reanchor_jax.cache import write_rows
from reanchor_jax.config import RetainRule
from reanchor_jax.pair import Pair
from reanchor_jax.state import DecodeState, Suffix
from reanchor_jax.trie import Trie
from reanchor_jax.verify import Verdict


class Committed(NamedTuple):
    """The state behind a commit, and the tokens that the target issued along the path."""

    state: DecodeState
    clipped: jax.Array  # () int32 tokens cut by EOS or the limit


def commit(pair: Pair, state: DecodeState, verdict: Verdict, accepted: Accepted) -> Committed:
    """Writes the accepted nodes' keys, values and context, and the new tokens.

    The only writer of the caches after prefill. Always writes W rows; those behind the accepted
    ones land beyond the new length, where no mask looks and the next commit overwrites.

    Example: anchor at i = 7, two drafts accepted. Rows 7, 8, 9 become valid, tokens 8, 9, 10 are
    the two drafts and the target's token behind them, and the new anchor stands at 10.
    """
    path = jnp.maximum(accepted.nodes, 0)
    cache = tuple(
        write_rows(kept, rows.k[:, :, path], rows.v[:, :, path], state.length)
        for kept, rows in zip(state.cache, verdict.kv, strict=True)
    )
    context = state.context
    if context.num_slots:
        assert pair.drafter is not None
        positions = state.length + jnp.arange(path.shape[0])
        rows = pair.drafter.context(verdict.features[path], positions)
        context = write_rows(context, rows.k, rows.v, state.length)

    # Behind accepted node k stands the target's token: the next draft, or the new anchor.
    issued = verdict.tokens[path]  # [W]
    slots = jnp.arange(path.shape[0])
    tokens = jax.lax.dynamic_update_slice(state.tokens, issued, (state.length + 1,))

    committed = accepted.count + 1
    is_eos = jnp.any(issued[:, None] == state.eos_ids[None, :], axis=1) & (slots < committed)
    until_eos = jnp.where(jnp.any(is_eos), jnp.argmax(is_eos) + 1, committed)
    kept = jnp.minimum(until_eos, state.limit - state.generated)
    kept = jnp.where(state.done, 0, kept).astype(jnp.int32)  # a round after the end changes nothing
    length = state.length + kept
    done = state.done | jnp.any(is_eos & (slots < kept)) | (length - state.prompt_len + 1 >= state.limit)
    state = dataclasses.replace(state, tokens=tokens, length=length, done=done, cache=cache, context=context)
    return Committed(state, committed - kept)


def retain_suffix(trie: Trie, verdict: Verdict, accepted: Accepted, rule: RetainRule, num_slots: int) -> Suffix:
    """Keeps the verifier states beyond the stop (paper, section 3.2).

    Rule `baseline`: the baseline block's nodes at positions >= r, none where more than the whole
    block was accepted. Rule `accepted_path`: the rest, beyond the stop, of the longest path that
    holds every accepted node (ties: the baseline, then the smallest d).

    Example: B = 4, one draft accepted, so r = i + 2: the baseline's nodes of depths 2 and 3 are
    kept as slots 0 and 1, and offsets 1 and 2 can be drafted next.

    Args:
      trie: verified trie.
      verdict: features and target tokens of its nodes.
      accepted: where verification stopped.
      rule: static retention rule.
      num_slots: B - 1.
    """
    start = accepted.count + 1  # depth of the first node that was not committed
    lengths = jnp.sum(trie.path_nodes >= 0, axis=1)  # [A] after the budget's cut
    if rule == "baseline":
        path, length = trie.path_nodes[0], lengths[0]
    else:
        on_path = (trie.path_nodes == accepted.nodes[None, :]) | (accepted.nodes[None, :] < 0)
        best = jnp.argmax(jnp.where(jnp.all(on_path, axis=1), lengths, -1))
        path, length = trie.path_nodes[best], lengths[best]
    slots = start + jnp.arange(num_slots)
    nodes = jnp.maximum(path[jnp.minimum(slots, path.shape[0] - 1)], 0)
    return Suffix(
        features=verdict.features[nodes],
        tokens=verdict.tokens[nodes],
        count=jnp.clip(length - start, 0, num_slots).astype(jnp.int32),
    )
