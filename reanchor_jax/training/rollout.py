"""Target-assisted rollouts: decoding of prompts that keeps every drafted block (paper, algorithm 4, line 2).

What a rollout finds is written once, one file for a batch of prompts, and read again by every step
that trains on it, in this process or in one that resumes the run.
"""

from __future__ import annotations

import zipfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from reanchor_jax.config import DecodeConfig
from reanchor_jax.decode import decode_round
from reanchor_jax.errors import ReanchorError
from reanchor_jax.files import written_whole
from reanchor_jax.pair import Pair
from reanchor_jax.prefill import prefill
from reanchor_jax.training.blocks import Batch
from reanchor_jax.training.data import LENGTH_STEP


class Rollout(NamedTuple):
    """The texts of R prompts, and the n blocks that were drafted on the way, as NumPy arrays.

    Example, B = 4: a block starts at position 7, two of its drafts are accepted, the third is
    not: starts 7, accepted 2, scored 3. Its anchor is the text's token 7, and so are the accepted
    drafts tokens 8 and 9; token 10 is the target's own, unlike proposals[2].
    """

    tokens: Any  # [R, T] int32 prompt and answer, 0 behind
    lengths: Any  # [R] int32 tokens of both; 0 for an empty row
    rows: Any  # [n] int32 text of each block
    starts: Any  # [n] int32 absolute position of its anchor
    proposals: Any  # [n, B-1] int32 all drafts, discarded ones too
    accepted: Any  # [n] int32 how many were accepted; all others of a block are discarded
    scored: Any  # [n] int32 drafts that mean something: up to an accepted end-of-text token


class _Rounds(NamedTuple):
    """What the loop keeps of each round; M is the most rounds there can be."""

    starts: jax.Array  # [M] int32
    proposals: jax.Array  # [M, B-1] int32
    accepted: jax.Array  # [M] int32


@partial(jax.jit, static_argnames=("config", "max_new_tokens"))
def _decode(
    pair: Pair, ids: jax.Array, lens: jax.Array, limits: jax.Array, keys: jax.Array,
    *, config: DecodeConfig, max_new_tokens: int,
) -> tuple[jax.Array, jax.Array, jax.Array, _Rounds]:  # fmt: skip
    """Token buffers [R, S], lengths [R], rounds [R] and what happened in them."""
    assert pair.drafter is not None
    num_drafts = pair.drafter.config.block_size - 1

    def one(ids, length, limit, key):
        state = prefill(pair, ids, length, key=key, config=config, max_new_tokens=max_new_tokens, limit=limit)

        def step(carry):
            state, n, rounds = carry
            after, record = decode_round(pair, state, config)
            rounds = _Rounds(
                rounds.starts.at[n].set(state.length),
                rounds.proposals.at[n].set(record.blocks[0, 1:]),
                rounds.accepted.at[n].set(record.accepted),
            )
            return after, n + 1, rounds

        zeros = jnp.zeros(max_new_tokens, jnp.int32)
        none = _Rounds(zeros, jnp.zeros((max_new_tokens, num_drafts), jnp.int32), zeros)
        state, count, rounds = jax.lax.while_loop(lambda c: ~c[0].done, step, (state, jnp.int32(0), none))
        return state.tokens, state.length + 1, count, rounds

    return jax.vmap(one)(ids, lens, limits, keys)


def roll_out(pair: Pair, prompts: Batch, key: jax.Array, *, config: DecodeConfig, max_new_tokens: int) -> Rollout:
    """Decodes a batch of prompts.

    Args:
      pair: target and the drafter in training.
      prompts: R prompts without answers; an empty row gives no block.
      key: PRNG key of the target's and the drafter's noise.
      config: of chain decoding (`rollout_config`).
      max_new_tokens: of each prompt.
    """
    real = np.asarray(prompts.lengths) > 0
    limits = np.where(real, max_new_tokens, 1).astype(np.int32)  # prefill alone reaches a limit of 1
    lens = np.maximum(prompts.lengths, 1).astype(np.int32)
    keys = jax.random.split(key, len(real))
    out = _decode(pair, prompts.tokens, lens, limits, keys, config=config, max_new_tokens=max_new_tokens)
    tokens, lengths, counts, rounds = jax.device_get(out)
    lengths = np.where(real, lengths, 0).astype(np.int32)
    size = -(-max(int(lengths.max()), 1) // LENGTH_STEP) * LENGTH_STEP
    tokens = np.pad(tokens, ((0, 0), (0, max(size - tokens.shape[1], 0))))[:, :size]
    happened = np.arange(max_new_tokens)[None, :] < counts[:, None]  # [R, M]
    accepted, proposals = rounds.accepted[happened], rounds.proposals[happened]
    return Rollout(
        tokens=np.where(np.arange(size)[None, :] < lengths[:, None], tokens, 0),
        lengths=lengths,
        rows=np.nonzero(happened)[0].astype(np.int32),
        starts=rounds.starts[happened],
        proposals=proposals,
        accepted=accepted,
        scored=scored_drafts(proposals, accepted, pair.target.config.eos_token_ids),
    )


def rollout_config(temperature: float) -> DecodeConfig:
    """Chain decoding; above temperature 0 the drafter samples its proposals too."""
    rule = "sample" if temperature > 0 else "greedy"
    return DecodeConfig(method="dflash", temperature=temperature, draft_rule=rule, bucket_nodes=False)


def scored_drafts(proposals: np.ndarray, accepted: np.ndarray, eos_ids: tuple[int, ...]) -> np.ndarray:
    """How many drafts of each block mean something, [n] int32 of proposals [n, B-1] and accepted [n].

    The text ends with an accepted end-of-text token, whatever both models say behind it. Example:
    proposals 5 EOS 7 8, three accepted: 2.
    """
    num_drafts = proposals.shape[1]
    ends = np.isin(proposals, eos_ids) & (np.arange(num_drafts)[None, :] < accepted[:, None])
    return np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, num_drafts).astype(np.int32)


def save_rollout(rollout: Rollout, path: Path) -> None:
    """Writes a compressed .npz, which is there as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as aside, aside.open("wb") as file:
        np.savez_compressed(file, **rollout._asdict())


def load_rollout(path: Path) -> Rollout:
    """Reads what `save_rollout` has written.

    Raises:
      ReanchorError: the file is missing or damaged.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return Rollout(**{name: arrays[name] for name in Rollout._fields})
    except FileNotFoundError:
        raise ReanchorError(
            f"{path} is missing; expected what this run's drafter drafted earlier: train into another folder"
        ) from None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ReanchorError(
            f"{path} is damaged: {' '.join(str(error).split())[:120]}; train into another folder"
        ) from None
