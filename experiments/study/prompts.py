"""Prompts of a study: datasets from JSONL files, the hub, or the tiny pair's recipe; sampled and encoded."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path

from experiments.study.hub import hub_rows
from reanchor_jax.cli import prompts as jsonl
from reanchor_jax.errors import ReanchorError
from reanchor_jax.tokenizer import ChatTokenizer
from reanchor_jax.training.target_training import encode
from reanchor_jax.training.tiny_pair import MAX_PROMPT
from reanchor_jax.training.tiny_text import document

HUB, SYNTHETIC = "hub", "synthetic"
LEAST_SIZE = 128
"""Prefill runs in chunks of as many tokens, so that shorter prompts gain nothing from a size of their own."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One encoded prompt."""

    dataset: str
    row: int
    """Its place in the shuffled dataset."""
    ids: tuple[int, ...]
    fingerprint: str

    @property
    def size(self) -> int:
        """Padded length: a power of two, so that few sizes compile."""
        return max(LEAST_SIZE, 1 << (len(self.ids) - 1).bit_length())


def load_datasets(
    sources: Sequence[str], names: Sequence[str], pair: str, samples: int, seed: int
) -> dict[str, list[jsonl.Prompt]]:
    """Shuffled rows of each dataset, all of them.

    Args:
      sources: JSONL files (a dataset each, named by the file), folders of them, `hub`, or `synthetic`:
        documents of the tiny pair's recipe that neither of its networks has seen.
      names: datasets to take, in this order; empty: all (of `hub`: there must be names).
      pair: the recipe's folder, for `synthetic`.
      samples: how many documents `synthetic` writes.
      seed: of the shuffle.

    Raises:
      ReanchorError: a source or name that is not there.
    """
    found: dict[str, list[jsonl.Prompt]] = {}
    for source in sources:
        if source == HUB:
            found |= {name: hub_rows(name) for name in names}
        elif source == SYNTHETIC:
            found[SYNTHETIC] = _synthetic(Path(pair), samples, seed)
        elif Path(source).is_dir():
            files = sorted(Path(source).glob("*.jsonl"))
            found |= {path.stem: jsonl.read_prompts(path) for path in files if not names or path.stem in names}
        else:
            found[Path(source).stem] = jsonl.read_prompts(Path(source))
    missing = [name for name in names if name not in found]
    if missing or not found:
        raise ReanchorError(
            f"--prompts {' '.join(sources)} has no dataset {missing[0] if missing else 'at all'}; expected "
            f"NAME.jsonl in a folder (found: {', '.join(found) or 'none'})"
        )
    found = {name: found[name] for name in names or found}
    for rows in found.values():
        random.Random(seed).shuffle(rows)
    return found


def encode_prompts(
    datasets: dict[str, list[jsonl.Prompt]],
    tokenizer: ChatTokenizer | None,
    *,
    samples: int,
    max_prompt: int,
    thinking: bool | None,
) -> tuple[list[Prompt], dict[str, int]]:
    """The first `samples` prompts of each dataset that have at most `max_prompt` tokens, first turns alone.

    Returns:
      The prompts, and how many of each dataset were too long on the way.

    Raises:
      ReanchorError: text without a tokenizer, a dataset without a prompt that is short enough.
    """
    prompts, too_long = [], {}
    for dataset, rows in datasets.items():
        taken, skipped = 0, 0
        for row, prompt in enumerate(rows):
            if taken == samples:
                break
            ids = _encode(prompt, tokenizer, thinking)
            if len(ids) > max_prompt:
                skipped += 1
                continue
            taken += 1
            prompts.append(Prompt(dataset, row, ids, prompt.fingerprint))
        if not taken:
            raise ReanchorError(f"{dataset} has no prompt of at most {max_prompt} tokens; raise --max-prompt")
        too_long[dataset] = skipped
    return prompts, too_long


def _encode(prompt: jsonl.Prompt, tokenizer: ChatTokenizer | None, thinking: bool | None) -> tuple[int, ...]:
    if prompt.ids:
        return prompt.ids
    if tokenizer is None:
        raise ReanchorError(f"{prompt.where} is text and the target has no tokenizer; give prompt_ids")
    text = prompt.turns[0]
    if not tokenizer.has_chat_template:
        return tuple(tokenizer.encode_plain(text))
    return tuple(tokenizer.encode_chat([{"role": "user", "content": text}], thinking=thinking))


def _synthetic(folder: Path, samples: int, seed: int) -> list[jsonl.Prompt]:
    """Starts of new documents, as the recipe cuts them, that are not among its own prompts."""
    try:
        recipe = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
        answers = (folder / "run" / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ReanchorError(
            f"--prompts synthetic needs the recipe's folder as --pair: {error.filename}: {error.strerror}"
        ) from None
    if recipe["text"] is not None:
        raise ReanchorError(f"{folder} learned {recipe['text']}, not synthetic text; give --prompts files")
    seen = {tuple(json.loads(line)["prompt_ids"]) for line in answers}
    rng = random.Random(f"held out {recipe['seed']} {seed}")
    prompts: list[jsonl.Prompt] = []
    while len(prompts) < samples:
        ids = tuple(encode(document(rng)[: rng.randint(24, MAX_PROMPT - 1)]))
        if ids not in seen:
            seen.add(ids)
            prompts.append(jsonl.Prompt(len(prompts), SYNTHETIC, ids=ids))
    return prompts
