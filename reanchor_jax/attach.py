"""Stage 2 of a round: where does each shifted block continue the baseline block?"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from reanchor_jax.config import AttachRule, Components, longest_path
from reanchor_jax.draft import Blocks


class Paths(NamedTuple):
    """Candidate continuations; row 0 is the baseline, row d comes from block d."""

    tokens: jax.Array  # [A, W] int32, anchor first
    lengths: jax.Array  # [A] int32 valid tokens; 0 for a dropped block
    sites: jax.Array  # [A] int32 attachment site t*, -1 where dropped; 0 for the baseline


def attach_blocks(blocks: Blocks, rule: AttachRule, key: jax.Array) -> Paths:
    """Attaches every shifted block to the baseline (paper, algorithm 1, lines 10 to 17).

    With T = {t : g(0)_t = g(d)_0}, block d continues the baseline prefix of length t*, one of T
    by the rule: `earliest` its minimum, `fixed` t = d where it matches, `fixed_unmatched` t = d
    without asking, `random` any of T, `longest` the one from which both blocks agree longest (ties: the
    earliest), `fallback` the earliest, or t = d where T is empty. No site: the block is dropped.

    A schedule cuts every block to its length first, so that no t lies behind the baseline's end.
    There itself, where t equals the length, an unmatched block can still attach.

    Example, B = 4: g(0) = a b c d, g(2) = b x y z gives T = {1} and the path a b x y z. Cut to
    lengths 3 and 2, the path of g(2) is a b x.

    Args:
      blocks: drafted blocks [A, B], their lengths [A].
      rule: static attachment rule.
      key: PRNG key, read by `random` alone.
    """
    tokens, lengths, (num_blocks, block_size) = blocks.tokens, blocks.lengths, blocks.tokens.shape
    offsets, slots = jnp.arange(num_blocks), jnp.arange(block_size)[None, :]
    matches = (tokens[0][None, :] == tokens[:, :1]) & (slots < lengths[0])  # [A, B] g(0)_t == g(d)_0
    at_offset = (slots == offsets[:, None]) & (slots <= lengths[0])
    match rule:
        case "earliest":
            score = matches.astype(jnp.float32)
        case "fixed":
            matches = matches & at_offset
            score = matches.astype(jnp.float32)
        case "fixed_unmatched":
            matches = at_offset
            score = matches.astype(jnp.float32)
        case "random":
            score = jnp.where(matches, jax.random.uniform(key, matches.shape, minval=1.0, maxval=2.0), 0.0)
        case "longest":
            score = _agreement(tokens, lengths).astype(jnp.float32)
        case "fallback":
            matches = matches | (at_offset & ~jnp.any(matches, axis=1, keepdims=True))
            score = matches.astype(jnp.float32)
    # argmax takes the first of equal scores: the earliest site.
    sites = jnp.where(jnp.any(matches, axis=1) & blocks.valid, jnp.argmax(score, axis=1), -1)
    sites = sites.astype(jnp.int32).at[0].set(0)

    # Path d is g(0)[0:t*] ++ g(d). With t* = 1, B = 4: slots 0 | 1 2 3 4 take g(0)_0 | g(d)_0..3.
    slots = jnp.arange(longest_path(num_blocks, block_size))[None, :]
    from_block = slots >= sites[:, None]
    baseline = tokens[0][jnp.minimum(slots, block_size - 1)]
    shifted = jnp.take_along_axis(tokens, jnp.clip(slots - sites[:, None], 0, block_size - 1), axis=1)
    return Paths(
        tokens=jnp.where(from_block, shifted, baseline),
        lengths=jnp.where(sites >= 0, sites + lengths, 0),
        sites=sites,
    )


def keep_components(paths: Paths, components: Components) -> Paths:
    """Takes from the paths what an ablation leaves out (paper, table 4); row 0 stays as it is.

    `in_block` ends every path where the baseline ends. `extension` lets it follow the baseline up to
    there and go on beyond; a path that ends before is dropped. `both` changes nothing.

    Example: baseline a b c d and the path a b x y z: `in_block` leaves a b x y, `extension` a b c d z.

    Args:
      paths: attached paths [A, W].
      components: static.
    """
    end = paths.lengths[0]
    if components == "in_block":
        return paths._replace(lengths=jnp.minimum(paths.lengths, end))
    if components == "extension":
        kept = (paths.lengths > end).at[0].set(True)
        native = jnp.arange(paths.tokens.shape[1])[None, :] < end
        return Paths(
            tokens=jnp.where(native, paths.tokens[:1], paths.tokens),
            lengths=jnp.where(kept, paths.lengths, 0),
            sites=jnp.where(kept, paths.sites, -1),
        )
    return paths


def _agreement(tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """[A, B]: for how many tokens g(d) and g(0)[t:] agree from their starts."""
    block_size = tokens.shape[1]
    t, k = jnp.arange(block_size)[:, None], jnp.arange(block_size)[None, :]
    baseline = tokens[0][jnp.minimum(t + k, block_size - 1)]  # [B, B] g(0)_{t+k}
    inside = (t + k < lengths[0])[None] & (k[None] < lengths[:, None, None])  # of both blocks
    equal = (baseline[None] == tokens[:, None, :]) & inside  # [A, B, B]
    return jnp.sum(jnp.cumprod(equal.astype(jnp.int32), axis=2), axis=2)
