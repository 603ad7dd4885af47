"""The command line `python -m reanchor_jax.train`: load, answer, train; exit codes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from reanchor_jax.checkpoint import load_drafter, load_target
from reanchor_jax.cli.process import run
from reanchor_jax.default_pair import drafter_source, target_source
from reanchor_jax.drafter import with_block_size
from reanchor_jax.errors import ReanchorError
from reanchor_jax.pair import check_pair
from reanchor_jax.target import Target
from reanchor_jax.tokenizer import load_tokenizer
from reanchor_jax.training.answers import Prompt, generate_answers, read_prompts
from reanchor_jax.training.arguments import Options, parse
from reanchor_jax.training.data import Text, read_answers, split_held_out
from reanchor_jax.training.draft_opd import DraftOPDConfig, draft_opd
from reanchor_jax.training.mesh import make_mesh
from reanchor_jax.training.progress import progress
from reanchor_jax.training.start import new_drafter, new_drafter_config, with_head
from reanchor_jax.training.tiny_pair import make_tiny_pair
from reanchor_jax.training.trainer import train


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code (see `--help`)."""
    smaller, interrupted = "--rows, --anchors or --max-len", "interrupted; the same command goes on"
    return run(lambda: _run(argv), smaller=smaller, interrupted=interrupted)


def _run(argv: Sequence[str] | None) -> int:
    options = parse(argv)
    if isinstance(options, Options):
        with nullcontext() if options.mesh is None else jax.set_mesh(make_mesh(options.mesh)):
            _train(options)
    else:
        config, folder = options
        with progress("drafter", config.steps) as (on_step, echo):
            make_tiny_pair(config, folder, echo=echo, on_step=on_step)
    return 0


def _train(options: Options) -> None:
    source = target_source(options.target)
    mesh = None if options.mesh is None else jax.sharding.get_mesh()  # no device ever holds more than its part
    target = load_target(source, dtype=jnp.dtype(options.compute_dtype), revision=options.revision, mesh=mesh)
    if options.init is not None:
        drafter = load_drafter(drafter_source(options.init), dtype=jnp.float32)
        check_pair(target, drafter)
        if options.block_size is not None:
            drafter = with_block_size(drafter, options.block_size)
        if options.head is not None:
            drafter = with_head(target, drafter, options.head, options.config.seed)
    else:
        assert options.mask_token_id is not None and options.block_size is not None
        drafter_config = new_drafter_config(
            target,
            num_layers=options.layers,
            block_size=options.block_size,
            mask_token_id=options.mask_token_id,
            target_layer_ids=options.target_layer_ids,
        )
        drafter = new_drafter(target, drafter_config, options.start, options.config.seed)
    if isinstance(options.config, DraftOPDConfig):
        prompts, held_out = _prompts(options, source, target)
        fit = partial(draft_opd, target, drafter, prompts, held_out, options.config, options.out)
    else:
        texts, held_out = _texts(options, source, target)
        is_new = options.init is None
        fit = partial(train, target, drafter, texts, held_out, options.config, options.out, start_is_scaled=is_new)
    with progress("training", options.config.optimizer.steps) as (on_step, echo):
        fit(features_folder=options.features, echo=echo, on_step=on_step)
        echo(f"saved {options.out / 'drafter'}")


def _texts(options: Options, source: str | Path, target: Target) -> tuple[list[Text], list[Text]]:
    """Training texts and held-out ones; answers the prompts first where they are prompts."""
    vocab_size, answers, held_out = target.config.vocab_size, options.answers, _held_out_answers(options, target)
    if answers is None:
        prompts = _read_prompts(options, source, target)
        if held_out is None and options.held_out >= len(prompts):
            raise ReanchorError(f"--held-out is {options.held_out}; expected fewer than the {len(prompts)} prompts")
        answers = _answer(options, target, prompts)
    texts = read_answers(answers, vocab_size, options.max_len)
    if held_out is not None:
        return texts, held_out
    return split_held_out(texts, options.held_out, options.config.seed)


def _prompts(options: Options, source: str | Path, target: Target) -> tuple[list[tuple[int, ...]], list[Text]]:
    """Prompts of rollouts, and held-out texts: only the latter need answers."""
    vocab_size, held_out = target.config.vocab_size, _held_out_answers(options, target)
    if options.answers is None:
        prompts = _read_prompts(options, source, target)
        if held_out is None:
            prompts, asked = split_held_out(prompts, options.held_out, options.config.seed)
            held_out = read_answers(_answer(options, target, asked), vocab_size, options.max_len)
        return [prompt.ids for prompt in prompts], held_out
    texts = read_answers(options.answers, vocab_size, options.max_len)
    if held_out is None:
        texts, held_out = split_held_out(texts, options.held_out, options.config.seed)
    longest = options.max_len - options.max_new_tokens
    ids = [text.prompt_ids for text in texts if len(text.prompt_ids) <= longest]
    if not ids:
        raise ReanchorError(
            f"{options.answers} has no prompt of at most {longest} tokens; raise --max-len or lower --max-new-tokens"
        )
    return ids, held_out


def _held_out_answers(options: Options, target: Target) -> list[Text] | None:
    if options.held_out_answers is None:
        return None
    return read_answers(options.held_out_answers, target.config.vocab_size, options.max_len)


def _read_prompts(options: Options, source: str | Path, target: Target) -> list[Prompt]:
    assert options.prompts is not None
    longest = options.max_len - options.max_new_tokens
    tokenizer = load_tokenizer(source, options.revision)
    return read_prompts(options.prompts, target.config.vocab_size, longest, tokenizer)


def _answer(options: Options, target: Target, prompts: list[Prompt]) -> Path:
    """Where the target's answers to the prompts are."""
    answers = options.out / "answers.jsonl"
    with progress("answers", len(prompts)) as (on_step, _):
        generate_answers(
            target,
            prompts,
            answers,
            max_new_tokens=options.max_new_tokens,
            num_rows=options.answer_rows,
            on_batch=lambda done: on_step(done, {}),
        )
    return answers
