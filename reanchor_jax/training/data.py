"""Texts to train on, and the batch of every step: a function of the step, nothing else."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from reanchor_jax.errors import ReanchorError
from reanchor_jax.training.blocks import Batch

T = TypeVar("T")

LENGTH_STEP = 128
"""Texts are padded to multiples of this, so that few lengths compile."""


@dataclasses.dataclass(frozen=True)
class Text:
    """A prompt and the target's own answer to it."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    source: str = ""

    @property
    def length(self) -> int:
        """Tokens of both."""
        return len(self.prompt_ids) + len(self.answer_ids)


def digest(texts: Sequence[Text]) -> str:
    """Fingerprint of texts, for a run's settings."""
    data = json.dumps([[text.prompt_ids, text.answer_ids] for text in texts])
    return hashlib.sha256(data.encode()).hexdigest()[:16]


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers from 1 and objects of a JSONL file, gzipped where the name ends in .gz.

    Raises:
      ReanchorError: the file cannot be read, or a line is no JSON object.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ReanchorError(f"{path} line {number} holds {type(row).__name__}; expected a JSON object")
                yield number, row
    except OSError as error:
        raise ReanchorError(f"{path} cannot be read: {error.strerror or error}; check the name") from None
    except (ValueError, EOFError, RecursionError, zlib.error) as error:
        if isinstance(error, ReanchorError):
            raise
        raise ReanchorError(f"{path} is not JSON lines: {' '.join(str(error).split())[:120]}; write it again") from None


def token_ids(value: Any, where: str, vocab_size: int) -> tuple[int, ...]:
    """A non-empty list of token ids below `vocab_size`, or ReanchorError."""
    fine = isinstance(value, list) and value and all(type(i) is int and 0 <= i < vocab_size for i in value)
    if not fine:
        raise ReanchorError(f"{where} is {str(value)[:60]}; expected a list of token ids from 0 to {vocab_size - 1}")
    return tuple(value)


def read_answers(path: Path, vocab_size: int, max_len: int) -> list[Text]:
    """Texts of a JSONL file with `prompt_ids`, `answer_ids` and perhaps `source`.

    Answers are cut where prompt and answer are longer than `max_len`; texts whose answer has
    fewer than two tokens then (no anchor with a successor) are left out.

    Raises:
      ReanchorError: a bad file or row, or no usable text.
    """
    texts = []
    for number, row in read_jsonl(path):
        where = f"{path} line {number}"
        prompt = token_ids(row.get("prompt_ids"), f"{where}: prompt_ids", vocab_size)
        answer = token_ids(row.get("answer_ids"), f"{where}: answer_ids", vocab_size)
        answer = answer[: max(max_len - len(prompt), 0)]
        if len(answer) >= 2:
            texts.append(Text(prompt, answer, str(row.get("source", ""))))
    if not texts:
        raise ReanchorError(f"{path} has no text with an answer of two tokens within {max_len}; give more answers")
    return texts


def split_held_out(texts: Sequence[T], num_held_out: int, seed: int) -> tuple[list[T], list[T]]:
    """Training texts (or prompts) and `num_held_out` others, drawn by the seed."""
    if not 0 < num_held_out < len(texts):
        raise ReanchorError(f"--held-out is {num_held_out}; expected 1 to {len(texts) - 1}, below the number of texts")
    order = np.random.default_rng((seed, 1)).permutation(len(texts))
    return [texts[i] for i in order[num_held_out:]], [texts[i] for i in order[:num_held_out]]


def make_batch(texts: Sequence[Text], num_rows: int) -> Batch:
    """One padded batch; missing rows are empty texts, which no anchor finds."""
    size = -(-max(text.length for text in texts) // LENGTH_STEP) * LENGTH_STEP
    tokens = np.zeros((num_rows, size), np.int32)
    prompt_lens, lengths = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
    for row, text in enumerate(texts):
        tokens[row, : text.length] = (*text.prompt_ids, *text.answer_ids)
        prompt_lens[row], lengths[row] = len(text.prompt_ids), text.length
    return Batch(tokens, prompt_lens, lengths)


def make_batches(texts: Sequence[Text], num_rows: int, seed: int) -> list[Batch]:
    """Batches of texts of like padded length, drawn once by the seed.

    What is in a batch never changes, only the order of batches does: so the target's features of
    a batch can be kept, and are bit for bit the same when they are computed again.
    """
    order = np.random.default_rng((seed, 2)).permutation(len(texts))
    groups: dict[int, list[Text]] = {}
    for i in order:
        groups.setdefault(-(-texts[i].length // LENGTH_STEP), []).append(texts[i])
    return [
        make_batch(group[start : start + num_rows], num_rows)
        for _, group in sorted(groups.items())
        for start in range(0, len(group), num_rows)
    ]


def batch_index(step: int, num_batches: int, seed: int) -> int:
    """Which batch step `step` takes: every epoch is its own permutation."""
    epoch, place = divmod(step, num_batches)
    return int(np.random.default_rng((seed, 3, epoch)).permutation(num_batches)[place])


def frequent_tokens(texts: Sequence[Text], limit: int) -> np.ndarray:
    """The at most `limit` most frequent answer tokens, ascending [V'] int32 (ties: smaller id)."""
    counts = Counter(token for text in texts for token in text.answer_ids)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    return np.array(sorted(ranked[:limit]), np.int32)
