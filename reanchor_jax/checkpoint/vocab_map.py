"""The map of a reduced vocabulary in checkpoint files: `d2t` and `t2d` of the speculators library.

`d2t` holds offsets: draft token j is target token j + d2t[j]. `t2d` marks the target tokens that
are draft tokens; it says nothing that `d2t` does not. Example, 3 draft tokens of 5 target tokens:
ids 0 2 3, d2t 0 1 1, t2d 1 0 1 1 0.
"""

from __future__ import annotations

import numpy as np

from reanchor_jax.errors import ReanchorError

OFFSETS, VLLM_OFFSETS, MARKS = "d2t", "draft_id_to_target_id", "t2d"
"""`VLLM_OFFSETS` is what vLLM calls `OFFSETS` once it has read it."""


def to_ids(offsets: np.ndarray) -> np.ndarray:
    """Target ids of the draft tokens."""
    return offsets + np.arange(len(offsets))


def to_tensors(ids: np.ndarray, vocab_size: int) -> dict[str, np.ndarray]:
    """Both tensors of the files, int64 and bool."""
    marks = np.zeros(vocab_size, bool)
    marks[ids] = True
    return {OFFSETS: ids.astype(np.int64) - np.arange(len(ids)), MARKS: marks}


def check(where: str, offsets: np.ndarray, marks: np.ndarray | None, vocab_size: int) -> None:
    """Raises ReanchorError where the ids are no rising target ids, or not those that `t2d` marks.

    Args:
      where: the checkpoint.
      offsets: [V'] `d2t`.
      marks: [V] `t2d`, where the file holds it.
      vocab_size: V of the target.
    """
    ids = to_ids(offsets)
    if np.any(ids < 0) or np.any(ids >= vocab_size) or np.any(np.diff(ids) <= 0):
        raise ReanchorError(
            f"{where}: {OFFSETS} gives target ids from {ids.min()} to {ids.max()}; expected ids that rise, within "
            f"0 to {vocab_size - 1}, as offsets from the draft ids"
        )
    if marks is not None and (marks.shape != (vocab_size,) or not np.array_equal(np.flatnonzero(marks), ids)):
        raise ReanchorError(
            f"{where}: {MARKS} marks {np.count_nonzero(marks)} of {marks.size} tokens, not the {len(ids)} of "
            f"{vocab_size} that {OFFSETS} names; use files that belong together"
        )
