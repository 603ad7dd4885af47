"""One round, as a pure function from state to state."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from reanchor_jax.accept import accept_path
from reanchor_jax.attach import attach_blocks, keep_components
from reanchor_jax.commit import commit, retain_suffix
from reanchor_jax.config import DecodeConfig, longest_path
from reanchor_jax.draft import Blocks, draft_blocks, draft_key
from reanchor_jax.pair import Pair, block_size
from reanchor_jax.sampling import position_noise, token_logprobs
from reanchor_jax.state import DecodeState, RoundRecord
from reanchor_jax.trie import merge_trie
from reanchor_jax.verify import verify_trie


def decode_round(pair: Pair, state: DecodeState, config: DecodeConfig) -> tuple[DecodeState, RoundRecord]:
    """One round: draft, attach, merge, verify, accept, commit, retain.

    Plain decoding is the round whose trie is the anchor alone. A round on a state that is done
    leaves its tokens and length as they are.

    Args:
      pair: networks.
      state: from `prefill` or an earlier round with the same `config`.
      config: static decoding settings.

    Returns:
      The next state, and what happened (fields that the caller drops are not computed).
    """
    size_b = block_size(pair, config)
    num_blocks = config.num_blocks(size_b)
    # Row r is the noise of position i + 1 + r; drafting (rule `coupled`) and verification share it.
    positions = state.length + 1 + jnp.arange(longest_path(num_blocks, size_b))
    noise = position_noise(state.key, positions, pair.target.config.vocab_size, config)
    with jax.named_scope("draft_blocks"):
        if config.method == "ar":
            blocks = Blocks(state.tokens[state.length][None, None], jnp.ones(1, bool), jnp.ones(1, jnp.int32))
        else:
            blocks = draft_blocks(pair, state, config, noise)
    with jax.named_scope("attach_blocks"):
        # -1 - i wraps to the top of uint32: never the fold at i that the drafts' own noise uses.
        attach_key = jax.random.fold_in(draft_key(state.key), -1 - state.length)
        paths = keep_components(attach_blocks(blocks, config.attach, attach_key), config.components)
    with jax.named_scope("merge_trie"):
        trie = merge_trie(paths, config.num_nodes(size_b))
    with jax.named_scope("verify_trie"):
        verdict = verify_trie(pair, state, trie, config, noise)
    with jax.named_scope("accept_path"):
        accepted = accept_path(trie, verdict.tokens)
    with jax.named_scope("commit"):
        new_state, clipped = commit(pair, state, verdict, accepted)
    if num_blocks > 1:
        with jax.named_scope("retain_suffix"):
            suffix = retain_suffix(trie, verdict, accepted, config.retain, size_b - 1)
            new_state = dataclasses.replace(new_state, suffix=suffix)
    record = RoundRecord(
        blocks=blocks.tokens,
        block_valid=blocks.valid,
        block_lengths=blocks.lengths,
        sites=paths.sites,
        trie_tokens=trie.tokens,
        trie_parents=trie.parents,
        trie_depths=trie.depths,
        trie_blocks=trie.blocks,
        target_tokens=verdict.tokens,
        path=accepted.nodes,
        accepted=accepted.count,
        clipped=clipped,
        num_nodes=trie.num_nodes,
        num_cut=trie.num_cut,
        num_retained=new_state.suffix.count,
        start=state.generated,
        logprobs=token_logprobs(verdict.logits, verdict.tokens, jnp.maximum(accepted.nodes, 0), config),
    )
    return new_state, record
