"""Before the first round: the prompt's caches and the first token."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from reanchor_jax.cache import init_cache, init_target_cache, write_rows
from reanchor_jax.config import DecodeConfig
from reanchor_jax.pair import Pair, block_size, tap_ids
from reanchor_jax.sampling import choose_target_tokens, position_noise, token_logprobs
from reanchor_jax.state import DecodeState, Suffix

PREFILL_CHUNK = 128
"""Prompt tokens of one prefill forward; a prompt takes as many forwards as it needs."""


def num_slots(pair: Pair, config: DecodeConfig, prompt_size: int, max_new_tokens: int) -> int:
    """S: cache slots for a padded prompt and its answer, with slack for one whole round.

    The last round starts at most at slot `prompt + max_new_tokens - 1` and writes at most 2B
    rows of tokens; without the slack `dynamic_update_slice` would clamp and overwrite.
    """
    chunks = -(-prompt_size // PREFILL_CHUNK)
    return max(chunks * PREFILL_CHUNK, prompt_size + max_new_tokens) + 2 * block_size(pair, config)


def prefill(
    pair: Pair,
    prompt_ids: jax.Array,
    prompt_len: jax.Array,
    *,
    key: jax.Array,
    config: DecodeConfig,
    max_new_tokens: int,
    limit: jax.Array | None = None,
    eos_ids: jax.Array | None = None,
) -> DecodeState:
    """Runs the prompt through the target and chooses the first token.

    Args:
      pair: networks.
      prompt_ids: [P] int32, padded at the end with anything. P is static: pad prompts to a few
        sizes, since each size compiles once.
      prompt_len: () int32 from 1 to P.
      key: PRNG key of all target randomness.
      config: static decoding settings.
      max_new_tokens: static capacity for new tokens.
      limit: () int32 tokens to generate, at most `max_new_tokens`; None takes that.
      eos_ids: [E] int32 tokens that end the text (-1 matches nothing); None takes the target's.

    Returns:
      The state before the first round. The first token belongs to no round.
    """
    target, size = pair.target, num_slots(pair, config, prompt_ids.shape[0], max_new_tokens)
    if eos_ids is None:
        eos_ids = jnp.array(target.config.eos_token_ids or (-1,), jnp.int32)
    max_tokens = jnp.int32(max_new_tokens) if limit is None else jnp.minimum(limit, max_new_tokens)
    chunk = PREFILL_CHUNK
    tokens = jnp.zeros(size, jnp.int32).at[: prompt_ids.shape[0]].set(prompt_ids)
    most_rows = max(chunk, 2 * block_size(pair, config))
    cache = init_target_cache(target.config, size, target.dtype, most_rows)
    drafter = None if config.method == "ar" else pair.drafter
    taps = tap_ids(pair, config)
    context = (
        init_cache(target.config.layer, 0, 0, target.dtype)
        if drafter is None
        else init_cache(drafter.config.layer, drafter.config.num_layers, size, target.dtype)
    )
    causal = jnp.tril(jnp.ones((chunk, chunk), bool))

    def run_chunk(index, carry):
        cache, context, last = carry
        start = index * chunk
        positions = start + jnp.arange(chunk)
        ids = jax.lax.dynamic_slice(tokens, (start,), (chunk,))
        output = target(ids, positions, cache, start, causal, taps)
        cache = tuple(write_rows(kept, rows.k, rows.v, start) for kept, rows in zip(cache, output.kv, strict=True))
        if drafter is not None:
            rows = drafter.context(output.features, positions)
            context = write_rows(context, rows.k, rows.v, start)
        # Only the prompt's last row becomes logits; in the last chunk it is really inside.
        last = output.hidden[jnp.clip(prompt_len - 1 - start, 0, chunk - 1)]
        return cache, context, last

    last = jnp.zeros(target.config.layer.hidden_size, target.dtype)
    num_chunks = (prompt_len + chunk - 1) // chunk
    cache, context, last = jax.lax.fori_loop(0, num_chunks, run_chunk, (cache, context, last))
    logits = target.logits(last[None])
    noise = position_noise(key, jnp.asarray(prompt_len)[None], target.config.vocab_size, config)
    first = choose_target_tokens(logits, noise, config)

    size_b = block_size(pair, config)
    num_features = len(taps) * target.config.layer.hidden_size
    return DecodeState(
        tokens=tokens.at[prompt_len].set(first[0]),
        length=jnp.asarray(prompt_len, jnp.int32),
        prompt_len=jnp.asarray(prompt_len, jnp.int32),
        limit=jnp.asarray(max_tokens, jnp.int32),
        eos_ids=eos_ids,
        done=jnp.any(first[0] == eos_ids) | (max_tokens <= 1),
        key=key,
        cache=cache,
        context=context,
        suffix=Suffix(
            features=jnp.zeros((size_b - 1, num_features), target.dtype),
            tokens=jnp.zeros(size_b - 1, jnp.int32),
            count=jnp.int32(0),
        ),
        first_logprobs=token_logprobs(logits, first, jnp.zeros(1, jnp.int32), config),
    )
