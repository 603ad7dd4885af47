"""The target's own answers to prompts, generated in batches; a stopped run goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from reanchor_jax.config import DecodeConfig
from reanchor_jax.errors import ReanchorError
from reanchor_jax.loop import generate
from reanchor_jax.pair import Pair
from reanchor_jax.target import Target
from reanchor_jax.tokenizer import ChatTokenizer
from reanchor_jax.training.checkpoints import check_settings
from reanchor_jax.training.data import read_jsonl, token_ids
from reanchor_jax.training.evaluate import PROMPT_STEP
from reanchor_jax.training.features import fingerprint
from reanchor_jax.training.mesh import split_texts


class Prompt(NamedTuple):
    """Token ids to be answered, and where they are from."""

    ids: tuple[int, ...]
    source: str = ""


def read_prompts(path: Path, vocab_size: int, max_len: int, tokenizer: ChatTokenizer | None) -> list[Prompt]:
    """Prompts of a JSONL file: `prompt_ids`, or `prompt` (text), or `turns` (the first is asked).

    Prompts of more than `max_len` tokens are left out.

    Raises:
      ReanchorError: a bad file or row, text without a tokenizer, no usable prompt.
    """
    prompts = []
    for number, row in read_jsonl(path):
        where = f"{path} line {number}"
        if "prompt_ids" in row:
            ids = token_ids(row["prompt_ids"], f"{where}: prompt_ids", vocab_size)
        else:
            turns = row.get("turns")
            text = turns[0] if isinstance(turns, list) and turns else row.get("prompt")
            if not isinstance(text, str):
                raise ReanchorError(f"{where} has keys {sorted(row)}; expected prompt, turns or prompt_ids")
            if tokenizer is None:
                raise ReanchorError(f"{where} is text and the target has no tokenizer; give prompt_ids")
            chat = tokenizer.has_chat_template
            ids = tokenizer.encode_chat([{"role": "user", "content": text}]) if chat else tokenizer.encode_plain(text)
            ids = tuple(ids)
        if len(ids) <= max_len:
            prompts.append(Prompt(ids, str(row.get("source", path.stem))))
    if not prompts:
        raise ReanchorError(f"{path} has no prompt of at most {max_len} tokens; raise --max-len or give shorter ones")
    return prompts


def generate_answers(
    target: Target,
    prompts: Sequence[Prompt],
    path: Path,
    *,
    max_new_tokens: int,
    num_rows: int,
    temperature: float = 0.0,
    on_batch: Callable[[int], None] = lambda done: None,
) -> None:
    """Appends an answer to `path` for every prompt that has none there yet.

    Each line holds `index` (of the prompt), `source`, `prompt_ids` and `answer_ids`. Half a line
    at the end, from a run that was killed, is cut off first. Above temperature 0 the noise of a
    prompt is keyed by its index, so that batches do not matter. What else the answers depend on is in
    a file beside them, `settings_of(path)`.

    Raises:
      ReanchorError: `path` holds answers to other prompts, of another target or under other settings.
    """
    done = _answered(path, prompts, target.config.vocab_size)
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "target": fingerprint(target)}
    check_settings(settings_of(path), settings, of=path.name)
    config = DecodeConfig(method="ar", temperature=temperature)
    run = jax.jit(partial(_answer_batch, config=config, max_new_tokens=max_new_tokens))
    # Prompts of one padded length share a batch and a compiled program.
    todo = sorted((i for i in range(len(prompts)) if i not in done), key=lambda i: (_padded(prompts[i]), i))
    with path.open("a", encoding="utf-8") as file:
        while todo:
            size = _padded(prompts[todo[0]])
            batch = [i for i in todo[:num_rows] if _padded(prompts[i]) == size]
            todo = todo[len(batch) :]
            ids, lens = np.zeros((num_rows, size), np.int32), np.ones(num_rows, np.int32)
            for row, i in enumerate(batch):
                ids[row, : len(prompts[i].ids)], lens[row] = prompts[i].ids, len(prompts[i].ids)
            # Missing rows have a limit of one token, which prefill already gives.
            limits = np.where(np.arange(num_rows) < len(batch), max_new_tokens, 1).astype(np.int32)
            keys = jax.vmap(jax.random.key)(np.resize(np.array(batch, np.int32), num_rows))
            tokens, counts = jax.device_get(run(target, *split_texts((ids, lens, limits, keys))))
            for row, i in enumerate(batch):
                answer = {
                    "index": i,
                    "source": prompts[i].source,
                    "prompt_ids": list(prompts[i].ids),
                    "answer_ids": tokens[row, : counts[row]].tolist(),
                }
                file.write(json.dumps(answer) + "\n")
            file.flush()
            done |= set(batch)
            on_batch(len(done))


def _answer_batch(
    target: Target,
    ids: jax.Array,
    lens: jax.Array,
    limits: jax.Array,
    keys: jax.Array,
    *,
    config: DecodeConfig,
    max_new_tokens: int,
) -> tuple[jax.Array, jax.Array]:
    """Tokens [R, max_new_tokens] and how many of them are real [R]."""
    run = partial(generate, Pair(target, None), config=config, max_new_tokens=max_new_tokens)
    result = jax.vmap(lambda ids, length, limit, key: run(ids, length, limit=limit, key=key))(ids, lens, limits, keys)
    return result.tokens, jnp.asarray(result.num_tokens)


def _padded(prompt: Prompt) -> int:
    return -(-len(prompt.ids) // PROMPT_STEP) * PROMPT_STEP


def settings_of(path: Path) -> Path:
    """Where `generate_answers` notes the settings of what is in `path`."""
    return path.with_name(f"{path.name}.settings")


def _answered(path: Path, prompts: Sequence[Prompt], vocab_size: int) -> set[int]:
    """Indices that `path` answers already."""
    if not path.exists():
        return set()
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with path.open("r+b") as file:
            file.truncate(whole)
    done = set()
    for number, row in read_jsonl(path):
        index = row.get("index")
        fits = type(index) is int and 0 <= index < len(prompts) and row.get("prompt_ids") == list(prompts[index].ids)
        if not fits:
            raise ReanchorError(f"{path} line {number} answers another prompt; use a new folder, or remove that file")
        token_ids(row.get("answer_ids"), f"{path} line {number}: answer_ids", vocab_size)
        done.add(index)
    return done
