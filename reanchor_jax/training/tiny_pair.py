"""The recipe `tiny-pair`: a byte-level target and its DFlash drafter from nothing, in minutes on two cores."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from reanchor_jax.checkpoint import load_drafter, load_target, save_drafter, save_target
from reanchor_jax.config import AttachRule, DecodeConfig, Method, RetainRule
from reanchor_jax.errors import ReanchorError
from reanchor_jax.files import write_whole
from reanchor_jax.pair import Pair
from reanchor_jax.target import Target
from reanchor_jax.training.answers import Prompt, generate_answers
from reanchor_jax.training.checkpoints import check_settings
from reanchor_jax.training.data import read_answers, split_held_out
from reanchor_jax.training.evaluate import make_decoder
from reanchor_jax.training.log import OnStep, ignore_step
from reanchor_jax.training.optimizer import OptimizerConfig
from reanchor_jax.training.start import Start, new_drafter, new_drafter_config
from reanchor_jax.training.target_training import MASK_ID, byte_target_config, encode, train_target, windows
from reanchor_jax.training.tiny_text import document
from reanchor_jax.training.trainer import TrainConfig, train

WINDOW = 160
"""Tokens of a training text; prompts and answers fit into it, so no position is new in decoding."""
MAX_PROMPT = 56
NEW_TOKENS = WINDOW - MAX_PROMPT
MEASURED_TOKENS = 96
"""New tokens of a prompt when tau is measured."""
NO_BUDGET = 100_000
"""Trie nodes beyond what any block size here can fill."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyPairConfig:
    """Settings of the recipe; the defaults make the pair that tests and demonstrations use."""

    model_type: str = "qwen3"
    """`qwen3` or `llama`."""
    text: Path | None = None
    """Text to learn, cut into windows; None: synthetic documents (`tiny_text`)."""
    seed: int = 0
    target_steps: int = 420
    target_rows: int = 16
    target_learning_rate: float = 4e-3
    num_prompts: int = 768
    """Prompts whose answers train the drafter."""
    num_held_out: int = 44
    num_layers: int = 3
    block_size: int = 16
    target_layer_ids: tuple[int, ...] = (0, 2, 4)
    start: Start = "random"
    steps: int = 240
    num_rows: int = 16
    num_anchors: int = 8
    learning_rate: float = 4e-3
    gamma: float = 7.0

    def validate(self) -> None:
        """Raises ReanchorError for values out of range that nothing else checks."""
        if self.model_type not in ("qwen3", "llama"):
            raise ReanchorError(f"--model-type is {self.model_type}; expected qwen3 or llama")
        if self.target_steps < 1:
            raise ReanchorError(f"--target-steps is {self.target_steps}; expected at least 1")


def make_tiny_pair(
    config: TinyPairConfig,
    folder: Path,
    *,
    echo: Callable[[str], None] = print,
    on_step: OnStep = ignore_step,
) -> None:
    """Trains a pair; a stopped run goes on where it was.

    `folder` gets `target/` and `drafter/` (checkpoint folders that `load_pair` reads, float32),
    `prompts.jsonl` (held-out prompts, field `prompt_ids`), `tau.json`, and `run/`, the drafter's
    training run.

    Raises:
      ReanchorError: bad settings, a text that is too short, a folder with other settings.
    """
    config.validate()
    documents = _documents(config)
    texts = windows(documents, WINDOW)
    if len(texts) < 64:
        raise ReanchorError(f"{config.text} gives {len(texts)} windows of {WINDOW} bytes; expected at least 64")
    folder.mkdir(parents=True, exist_ok=True)
    settings = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    check_settings(folder / "recipe.json", settings)
    started = time.monotonic()

    target = _target(config, texts, folder, echo)
    prompts = _prompts(documents, config)
    answers = folder / "run" / "answers.jsonl"
    generate_answers(target, prompts, answers, max_new_tokens=NEW_TOKENS, num_rows=256)
    echo(f"answers to {len(prompts)} prompts after {time.monotonic() - started:.0f} s")

    rows = read_answers(answers, target.config.vocab_size, WINDOW)
    training, held_out = split_held_out(rows, config.num_held_out, config.seed)
    seen = {text.prompt_ids for text in training}
    held_out = [text for text in held_out if text.prompt_ids not in seen]
    drafter_config = new_drafter_config(
        target,
        num_layers=config.num_layers,
        block_size=config.block_size,
        mask_token_id=MASK_ID,
        target_layer_ids=config.target_layer_ids,
    )
    drafter = train(
        target,
        new_drafter(target, drafter_config, config.start, config.seed),
        training,
        held_out,
        TrainConfig(
            optimizer=OptimizerConfig(
                steps=config.steps, learning_rate=config.learning_rate, warmup=min(30, config.steps // 10)
            ),
            num_rows=config.num_rows,
            num_anchors=config.num_anchors,
            gamma=config.gamma,
            seed=config.seed,
            tau_prompts=0,
            eval_every=120,
            checkpoint_every=120,
        ),
        folder / "run",
        start_is_scaled=True,
        echo=echo,
        on_step=on_step,
    )
    save_drafter(drafter, folder / "drafter", dtype=np.dtype("float32"))
    lines = [json.dumps({"prompt_ids": text.prompt_ids}) + "\n" for text in held_out]
    write_whole(folder / "prompts.jsonl", "".join(lines))
    echo(f"trained after {time.monotonic() - started:.0f} s")
    _measure(folder, held_out_prompts=[text.prompt_ids for text in held_out], echo=echo)
    echo(f"done after {time.monotonic() - started:.0f} s: {folder}")


def _documents(config: TinyPairConfig) -> list[str]:
    rng = random.Random(config.seed)
    if config.text is None:
        return [document(rng) for _ in range(12000)]
    try:
        text = config.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReanchorError(f"{config.text} cannot be read as UTF-8 text: {error}; check the file") from None
    starts = range(0, max(len(text) - WINDOW, 0), 16)
    documents = [text[start : start + WINDOW] for start in starts]
    rng.shuffle(documents)
    return documents


def _prompts(documents: list[str], config: TinyPairConfig) -> list[Prompt]:
    """Document starts of 24 to 55 bytes behind BOS, each once."""
    rng = random.Random(config.seed + 1)
    wanted, prompts = config.num_prompts + config.num_held_out, {}
    for text in documents:
        ids = tuple(encode(text[: rng.randint(24, MAX_PROMPT - 1)]))
        prompts.setdefault(ids, Prompt(ids))
        if len(prompts) == wanted:
            break
    return list(prompts.values())


def _target(config: TinyPairConfig, texts: np.ndarray, folder: Path, echo: Callable[[str], None]) -> Target:
    """Trains the target, or loads it where an earlier run has."""
    if not (folder / "target" / "config.json").exists():
        target = train_target(
            byte_target_config(config.model_type),
            texts,
            steps=config.target_steps,
            num_rows=config.target_rows,
            learning_rate=config.target_learning_rate,
            seed=config.seed,
            echo=echo,
        )
        save_target(target, folder / "target", dtype=np.dtype("float32"))
    return load_target(folder / "target")


def _measure(folder: Path, *, held_out_prompts: list[tuple[int, ...]], echo: Callable[[str], None]) -> None:
    """tau of every method on the held-out prompts, from the saved folders; writes tau.json."""
    pair = Pair(load_target(folder / "target"), load_drafter(folder / "drafter"))
    methods: list[tuple[Method, AttachRule, RetainRule]] = [
        ("dflash", "earliest", "baseline"),
        ("reanchor", "earliest", "baseline"),
        ("reanchor", "earliest", "accepted_path"),
        ("reanchor", "fallback", "baseline"),
        ("reanchor", "fallback", "accepted_path"),
    ]
    results, plain = [], None
    for method, attach, retain in methods:
        # No budget: the comparison of rules should not depend on what each loses to a cut.
        config = DecodeConfig(method=method, attach=attach, retain=retain, nodes=NO_BUDGET)
        decoding = make_decoder(config, MEASURED_TOKENS)(pair, held_out_prompts)
        plain = decoding.token_ids if plain is None else plain
        name = method if method == "dflash" else f"{method} {attach} {retain}"
        results.append({"method": name, "tau": decoding.tau, "nodes": decoding.nodes})
        same = "same ids" if decoding.token_ids == plain else "OTHER IDS than dflash"
        echo(
            f"{name:32} tau {decoding.tau:.3f} ({decoding.tau / results[0]['tau'] - 1:+.1%}), "
            f"{decoding.nodes:.1f} nodes a round, {same}"
        )
    summary = {"prompts": len(held_out_prompts), "new_tokens": MEASURED_TOKENS, "results": results}
    write_whole(folder / "tau.json", json.dumps(summary, indent=1))
