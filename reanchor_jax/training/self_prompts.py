"""More prompts for a small set: the target finishes the first words of each prompt in its own way.

    python -m reanchor_jax.training.self_prompts --prompts FILE.jsonl .. --out FILE.jsonl [--target SOURCE]

A drafter learns a target's answers, and a few thousand of them are learned by heart long before
it is good. What a chat model writes in the user's turn resembles what it was trained on, and the
first words of a real prompt keep it at the task. What all prompts of a source share stays as it
is, since the words of a template belong to the task:

    Q: How many apples are in 3 bags of 4? Reason step by step.     one of the source's prompts
    Q: How many apples are                                          kept: its shared head and a part
    Q: How many apples are left when 2 of 9 are eaten? Reason step by step.   written, and the shared tail

`--out` has `prompt_ids` and `source`, for `python -m reanchor_jax.train --prompts`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from reanchor_jax.checkpoint import load_target
from reanchor_jax.cli.flags import Parser, number, whole
from reanchor_jax.cli.process import run
from reanchor_jax.default_pair import DEFAULT_PAIR, target_source
from reanchor_jax.errors import ReanchorError
from reanchor_jax.files import write_whole
from reanchor_jax.tokenizer import ChatTokenizer, load_tokenizer
from reanchor_jax.training.answers import Prompt, generate_answers, read_prompts, settings_of
from reanchor_jax.training.data import read_jsonl
from reanchor_jax.training.progress import progress

KEPT_SHARE = (0.15, 0.6)
"""Bounds of the part of a prompt that is kept."""


def shared_ends(prompts: Sequence[Prompt]) -> tuple[int, int]:
    """How many tokens at the start, and at the end, all prompts of a source share.

    Example: [1 7 8 2 9], [1 7 5 2 9] and [1 7 2 9] share 2 at the start and 2 at the end.
    """
    rows = [prompt.ids for prompt in prompts]
    shortest = min(len(row) for row in rows)

    def common(rows: list[tuple[int, ...]], limit: int) -> int:
        return next((k for k in range(limit) if len({row[k] for row in rows}) > 1), limit)

    head = common(rows, shortest)
    return head, common([row[::-1] for row in rows], shortest - head)


class Beginning(NamedTuple):
    """The kept part of a prompt, and what belongs around what is written behind it."""

    prompt: Prompt
    head: int
    """Tokens of `prompt.ids` that the source's prompts share."""
    tail: tuple[int, ...]


def beginnings(prompts: Sequence[Prompt], copies: int, seed: int) -> list[Beginning]:
    """`copies` beginnings of every prompt, with cuts of their own.

    Prompts are grouped by their `source`; one whose own part has fewer than four tokens is left out.

    Raises:
      ReanchorError: no prompt is left.
    """
    kept = []
    for place, source in enumerate(sorted({prompt.source for prompt in prompts})):
        group = [prompt for prompt in prompts if prompt.source == source]
        head, tail = shared_ends(group)
        rng = np.random.default_rng((seed, place))
        for prompt in group * copies:
            own = len(prompt.ids) - head - tail
            if own >= 4:
                cut = head + max(1, int(own * rng.uniform(*KEPT_SHARE)))
                kept.append(Beginning(Prompt(prompt.ids[:cut], source), head, prompt.ids[len(prompt.ids) - tail :]))
    if not kept:
        raise ReanchorError("the prompts differ in fewer than four tokens; expected more of them, or other ones")
    return kept


def finished(beginning: Beginning, written: Sequence[int], tokenizer: ChatTokenizer) -> tuple[int, ...] | None:
    """Ids of a whole prompt; None where the target did not end its turn, or wrote control tokens into it."""
    if written[-1] not in tokenizer.eos_ids or any(tokenizer.is_skipped(i) for i in written[:-1]):
        return None
    head, own = beginning.prompt.ids[: beginning.head], beginning.prompt.ids[beginning.head :]
    # Tokenized again, since where the two parts meet the tokens may not be the tokenizer's.
    text = tokenizer.decode([*own, *written[:-1]])
    return (*head, *tokenizer.encode_plain(text), *beginning.tail)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    return run(lambda: _run(argv), smaller="--rows", interrupted="interrupted; the same command goes on")


def _run(argv: Sequence[str] | None) -> int:
    flags = _parser().parse_args(argv)
    if flags.out.exists() and not flags.out.is_file():
        raise ReanchorError(f"--out is {flags.out}, which is no file; expected a file, or a name that is free")
    source = target_source(flags.target)
    target, tokenizer = load_target(source, dtype=jnp.float32), load_tokenizer(source)
    if tokenizer is None:
        raise ReanchorError(f"{flags.target} has no tokenizer; expected one beside the target")
    read = partial(read_prompts, vocab_size=target.config.vocab_size, max_len=flags.max_len, tokenizer=tokenizer)
    prompts = [prompt for path in flags.prompts for prompt in read(path)]
    starts = beginnings(prompts, flags.copies, flags.seed)
    parts = flags.out.with_name(flags.out.name + ".parts")
    with progress("prompts", len(starts)) as (on_step, _):
        generate_answers(
            target,
            [start.prompt for start in starts],
            parts,
            max_new_tokens=flags.max_new_tokens,
            num_rows=flags.rows,
            temperature=flags.temperature,
            on_batch=lambda done: on_step(done, {}),
        )
    known, lines = {prompt.ids for prompt in prompts}, []
    for _, row in sorted(read_jsonl(parts), key=lambda line: line[1]["index"]):
        ids = finished(starts[row["index"]], row["answer_ids"], tokenizer)
        if ids is not None and len(ids) <= flags.max_len and ids not in known:
            known.add(ids)
            lines.append(json.dumps({"source": starts[row["index"]].prompt.source, "prompt_ids": ids}) + "\n")
    if lines:
        write_whole(flags.out, "".join(lines))
    parts.unlink()
    settings_of(parts).unlink(missing_ok=True)
    if not lines:
        raise ReanchorError(
            f"the target finished none of {len(starts)} beginnings as a new prompt; raise --max-new-tokens or --copies"
        )
    print(f"saved {flags.out}: {len(lines)} prompts from {len(starts)} beginnings")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m reanchor_jax.training.self_prompts",
        description="Prompts that the target writes, from the first words of given ones.",
        epilog="A stopped run goes on by the same command. Exit codes: 0 done; 2 bad input; 130 interrupted.",
    )
    add = parser.add_argument
    add("--prompts", type=Path, nargs="+", required=True, metavar="FILE", help="JSONL, as for training; a source each")
    add("--out", type=Path, required=True, metavar="FILE", help="JSONL of the new prompts")
    add("--target", default=DEFAULT_PAIR, metavar="SOURCE", help="hub id, folder, GGUF file or %(default)s (default)")
    add("--copies", type=whole(1), default=1, metavar="N", help="new prompts from each (default %(default)s)")
    add("--temperature", type=number, default=0.8, metavar="T", help="of the writing (default %(default)s)")
    add("--max-len", type=whole(8), default=320, metavar="N", help="tokens of a prompt at most (default %(default)s)")
    add("--max-new-tokens", type=whole(2), default=96, metavar="N", help="tokens written at most (default %(default)s)")
    add("--rows", type=whole(1), default=64, metavar="N", help="prompts written at once (default %(default)s)")
    add("--seed", type=whole(0, 2**31 - 1), default=0, metavar="N", help="of the cuts (default %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
