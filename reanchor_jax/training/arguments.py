"""Flags of `python -m reanchor_jax.train`. Everything that needs no file is checked here."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from reanchor_jax.checkpoint.drafter_config import MAX_BLOCK
from reanchor_jax.checkpoint.fields import MAX_WIDTH
from reanchor_jax.cli.flags import Parser, folder, number, whole
from reanchor_jax.config import DominoConfig, DSparkConfig, HeadConfig, MarkovHead
from reanchor_jax.default_pair import DEFAULT_PAIR
from reanchor_jax.errors import ReanchorError
from reanchor_jax.training.draft_opd import DraftOPDConfig
from reanchor_jax.training.mesh import MeshShape, check_rows, mesh_shape
from reanchor_jax.training.optimizer import OptimizerConfig
from reanchor_jax.training.recipe_file import read_recipe, recipe_flags, recipe_names
from reanchor_jax.training.run import TrainConfig
from reanchor_jax.training.start import Start
from reanchor_jax.training.tensorboard import check_installed
from reanchor_jax.training.tiny_pair import TinyPairConfig

_EPILOG = """\
The run lives in --out: train.json (settings), answers.jsonl (the target's, to --prompts), features/,
log.jsonl, log.csv and curve.png and .svg (the log as a table and as a plot), checkpoints/, and two
drafters in their kind's format, for --drafter of the other commands: drafter/, the latest, and best/,
that of the highest held-out proxy tau. The same command line goes on with a run that was stopped, by
Ctrl-C or by force.
Exit codes: 0 done; 2 bad input, one line on stderr; 130 interrupted.
"""

_TRAINING = (
    *("train_vocab", "distill", "num_top", "feature_dtype", "freeze_backbone"),
    *("log_every", "eval_every", "checkpoint_every", "tau_prompts", "tau_tokens", "tensorboard"),
)
"""Flags that are fields of `TrainConfig` as they are."""

_DEFAULTS = {
    **{"steps": 2000, "rows": 4, "anchors": 32, "learning_rate": 5e-4, "gamma": 4.0, "seed": 0, "accumulate": 1},
    "compute_dtype": "float32",
    **{"layers": 3, "block_size": 16, "start": "layers"},
}
"""Of a run for any target; the recipe tiny-pair, which shares these flags, has its own in `TinyPairConfig`."""

_DRAFT_OPD = {"steps": 400, "learning_rate": 1e-4, "gamma": 0.9}
"""Other defaults of the recipe draft-opd."""

_BUILT_IN = ("tiny-pair", "draft-opd")
"""Recipes that are more than flags; the others are files."""

_OF_RECIPE = {
    **{name: "tiny-pair" for name in ("text", "model_type", "target_steps")},
    **{name: "draft-opd" for name in ("temperature", "rollout_batches", "passes")},
}
"""Flags that one recipe alone has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """One command line for training a drafter."""

    target: str
    revision: str | None
    out: Path
    prompts: Path | None
    answers: Path | None
    held_out: int
    held_out_answers: Path | None
    max_len: int
    max_new_tokens: int
    answer_rows: int
    init: str | None
    start: Start
    layers: int
    block_size: int | None
    """None: that of `init`."""
    mask_token_id: int | None
    target_layer_ids: tuple[int, ...] | None
    features: Path | None
    mesh: MeshShape | None
    compute_dtype: str
    """Of the target, and of the drafter's forward and backward."""
    head: HeadConfig | None
    """Of a fresh head on the backbone of `init`; None: its own."""
    config: TrainConfig
    """`DraftOPDConfig` for that recipe."""


def parse(argv: Sequence[str] | None) -> Options | tuple[TinyPairConfig, Path]:
    """A training run's options, or the recipe's settings and folder.

    Raises:
      ReanchorError: an unknown flag, a value outside its range, flags that exclude each other.
      SystemExit: after `--help`, with code 0.
    """
    parser = make_parser()
    argv = sys.argv[1:] if argv is None else argv
    flags = vars(parser.parse_args(argv))
    if flags["recipe"] not in (None, *_BUILT_IN):
        # The file's flags stand before the command line's, which therefore win.
        flags = vars(parser.parse_args([*recipe_flags(read_recipe(flags["recipe"]), parser), *argv]))
        flags["recipe"] = None
    recipe = flags.pop("recipe")
    if flags["tensorboard"]:
        check_installed()
    for name, owner in _OF_RECIPE.items():
        if recipe != owner and flags.pop(name) is not None:
            raise ReanchorError(f"--{name.replace('_', '-')} belongs to --recipe {owner}; expected no such flag here")
    if recipe == "tiny-pair":
        return _recipe(flags)
    if recipe == "draft-opd":
        _check_draft_opd(flags)
    shape = ("layers", "mask_token_id", "target_layer_ids", "start")
    given = [name for name in shape if flags[name] is not None]
    if flags["init"] is not None and given:
        raise ReanchorError(f"--{given[0].replace('_', '-')} is of a new drafter; expected none beside --init")
    if flags["init"] is None and flags["mask_token_id"] is None:
        raise ReanchorError("--mask-token-id is missing; name a token that the target never writes, or --init DRAFTER")
    if (flags["prompts"] is None) == (flags["answers"] is None):
        raise ReanchorError("expected either --prompts FILE.jsonl or --answers FILE.jsonl; give one of them")
    flags["head"] = _head(flags)
    own = ("block_size",) if flags["init"] is not None else ()
    flags |= {name: value for name, value in _DEFAULTS.items() if flags[name] is None and name not in own}
    if flags["mesh"] is not None:
        for name in ("rows", "answer_rows"):
            check_rows(flags[name], flags["mesh"].data, f"--{name.replace('_', '-')}")
    steps, warmup, accumulate = (flags.pop(name) for name in ("steps", "warmup", "accumulate"))
    optimizer = OptimizerConfig(
        steps=steps,
        learning_rate=flags.pop("learning_rate"),
        warmup=min(100, steps // 10, max(steps - accumulate, 0)) if warmup is None else warmup,
        accumulate=accumulate,
        weight_decay=flags.pop("weight_decay"),
    )
    optimizer.validate()
    settings = {
        "optimizer": optimizer,
        "num_rows": flags.pop("rows"),
        "num_anchors": flags.pop("anchors"),
        "seed": flags.pop("seed"),
        "eval_first": flags["init"] is not None,
        **{name: flags.pop(name) for name in _TRAINING},
    }
    gamma = flags.pop("gamma")
    if recipe != "draft-opd":
        return Options(config=TrainConfig(**settings, gamma=gamma), **flags)
    own = {name: flags.pop(name) for name in ("temperature", "rollout_batches", "passes")}
    own = {name: value for name, value in own.items() if value is not None}
    config = DraftOPDConfig(**settings, **own, replay_gamma=gamma, rollout_tokens=flags["max_new_tokens"])
    config.validate()
    return Options(config=config, **flags)


def _check_draft_opd(flags: dict[str, Any]) -> None:
    """Raises ReanchorError for flags that do not go with the recipe; fills in its own defaults."""
    if flags["init"] is None:
        raise ReanchorError("--recipe draft-opd goes on from a drafter; name it with --init")
    if flags["mesh"] is not None:
        raise ReanchorError("--mesh does not go with --recipe draft-opd, which runs on one device; leave it out")
    if flags["head"] is not None:
        raise ReanchorError("--head does not go with --recipe draft-opd; leave it out, or train the head first")
    if flags["distill"]:
        raise ReanchorError(
            "--distill does not go with --recipe draft-opd, whose labels are distributions; leave it out"
        )
    if flags["max_new_tokens"] >= flags["max_len"]:
        raise ReanchorError(
            f"--max-new-tokens is {flags['max_new_tokens']}; expected fewer than --max-len, {flags['max_len']}"
        )
    flags |= {name: value for name, value in _DRAFT_OPD.items() if flags[name] is None}


def _head(flags: dict[str, Any]) -> HeadConfig | None:
    """Config of a fresh head; its flags leave `flags`."""
    own = {name: flags.pop(name) for name in ("rank", "gru", "markov")}
    of_kind = {"domino": ("rank", "gru"), "dspark": ("rank", "markov")}.get(flags["head"], ())
    for name, value in own.items():
        if value is not None and name not in of_kind:
            head = "no --head" if flags["head"] is None else f"--head {flags['head']}"
            raise ReanchorError(f"--{name} is of another head; expected no such flag with {head}")
    if flags["head"] is not None and flags["init"] is None:
        raise ReanchorError(f"--head {flags['head']} needs a backbone; name a drafter with --init")
    if flags["head"] == "dspark" and flags["freeze_backbone"]:
        raise ReanchorError(
            "--freeze-backbone does not go with --head dspark, whose slots draft one token further than those of "
            "--init: leave it out"
        )
    rank, gru, markov = own["rank"] or 128, own["gru"] or 256, own["markov"] or "gated"
    if flags["head"] == "domino":
        # The backbone's own alignment; its first draft depends on nothing that was drafted.
        return DominoConfig(emb_dim=rank, gru_hidden_dim=gru, shift_label=False, pure_draft_prefix_len=1)
    if flags["head"] == "dspark":
        return DSparkConfig(
            markov_rank=rank, markov_head_type=markov, enable_confidence_head=True, confidence_head_with_markov=True
        )
    return None


def _recipe(flags: dict[str, Any]) -> tuple[TinyPairConfig, Path]:
    names = {
        "text": "text", "model_type": "model_type", "target_steps": "target_steps", "steps": "steps",
        "seed": "seed", "rows": "num_rows", "anchors": "num_anchors", "gamma": "gamma", "layers": "num_layers",
        "block_size": "block_size", "target_layer_ids": "target_layer_ids", "learning_rate": "learning_rate",
        "start": "start",
    }  # fmt: skip
    parser = make_parser()
    for name, value in flags.items():
        if name not in ("out", *names) and value != parser.get_default(name):
            raise ReanchorError(f"--{name.replace('_', '-')} does not go with --recipe tiny-pair; leave it out")
    given = {field: flags[name] for name, field in names.items() if flags[name] is not None}
    config = TinyPairConfig(**given)
    config.validate()
    return config, flags["out"]


def make_parser() -> argparse.ArgumentParser:
    """The command line's parser."""
    parser = Parser(
        prog="python -m reanchor_jax.train",
        description="Trains a drafter for a target, from prompts or from the target's own answers.",
        epilog=_EPILOG,
    )
    d = _DEFAULTS
    add = parser.add_argument
    add("--out", type=folder, required=True, metavar="DIR", help="folder of the run")
    add("--target", default=DEFAULT_PAIR, metavar="SOURCE", help="hub id, folder, GGUF file or %(default)s (default)")
    add("--revision", metavar="REV", help="hub revision of the target")

    add = parser.add_argument_group("texts").add_argument
    add(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="JSONL: `prompt`, `turns` or `prompt_ids`, for the target to answer",
    )
    add("--answers", type=Path, metavar="FILE", help="JSONL (.gz): `prompt_ids`, `answer_ids` of the target, `source`")
    add("--held-out", type=whole(1), default=64, metavar="N", help="texts kept for evaluation (default %(default)s)")
    add("--held-out-answers", type=Path, metavar="FILE", help="texts for evaluation from a file of their own")
    add("--max-len", type=whole(8), default=512, metavar="N", help="tokens of a text at most (default %(default)s)")
    add(
        "--max-new-tokens",
        type=whole(2),
        default=200,
        metavar="N",
        help="tokens of an answer at most (default %(default)s)",
    )
    add("--answer-rows", type=whole(1), default=16, metavar="N", help="prompts answered at once (default %(default)s)")

    add = parser.add_argument_group("drafter").add_argument
    add("--init", metavar="SOURCE", help="drafter to go on from: folder, hub id, or smollm2-135m")
    add("--start", choices=get_args(Start), help="new drafter: the target's last layers (default) or random weights")
    add("--layers", type=whole(1), metavar="N", help=f"new drafter: layers (default {d['layers']})")
    add(
        "--block-size",
        type=whole(2, MAX_BLOCK),
        metavar="B",
        help=f"anchor and drafts of a block (default {d['block_size']}, or as --init has it)",
    )
    add("--mask-token-id", type=whole(0), metavar="ID", help="new drafter: a token that the target never writes")
    add("--target-layer-ids", type=_ids, metavar="I,J,..", help="new drafter: tapped layers (default: 5 spread ones)")

    add("--head", choices=("domino", "dspark"), help="a fresh head on the backbone of --init (default: its own head)")
    add("--rank", type=whole(1, MAX_WIDTH), metavar="N", help="fresh head: rank of the correction (default 128)")
    add("--gru", type=whole(1, MAX_WIDTH), metavar="N", help="fresh domino head: width of the GRU (default 256)")
    add("--markov", choices=get_args(MarkovHead), help="fresh dspark head: kind of correction (default gated)")
    add("--freeze-backbone", action="store_true", help="train the head alone")

    add = parser.add_argument_group("optimization").add_argument
    add("--steps", type=whole(1), metavar="N", help=f"steps of training (default {d['steps']})")
    add("--rows", type=whole(1), metavar="R", help=f"texts of a step (default {d['rows']})")
    add("--anchors", type=whole(1), metavar="K", help=f"blocks of a text and step (default {d['anchors']})")
    accumulate_help = f"steps whose mean gradient makes one update of the drafter (default {d['accumulate']})"
    add("--accumulate", type=whole(1), metavar="N", help=accumulate_help)
    add("--learning-rate", type=number, metavar="LR", help=f"at its peak (default {d['learning_rate']:g})")
    add("--warmup", type=whole(0), metavar="N", help="steps of growth (default: a tenth, at most 100)")
    add("--weight-decay", type=number, default=0.01, metavar="W", help="of matrices (default %(default)s)")
    seed_help = f"of what is held out, new weights, the order of texts and anchors (default {d['seed']})"
    add("--seed", type=whole(0, 2**31 - 1), metavar="N", help=seed_help)

    add = parser.add_argument_group("loss").add_argument
    gamma_help = f"draft k has weight exp(-(k - 1) / G) (default {d['gamma']:g}); draft-opd: G^(k - 1) if discarded"
    add("--gamma", type=_above_0, metavar="G", help=gamma_help)
    add("--train-vocab", type=whole(2), metavar="V", help="score the V most frequent answer tokens only (default: all)")
    distill_help = "share of each label that is the target's distribution, 0 to 1 (default %(default)g)"
    add("--distill", type=_share, default=0.0, metavar="A", help=distill_help)
    top_help = "most probable tokens of that distribution that are kept (default %(default)s)"
    add("--num-top", type=whole(1), default=8, metavar="N", help=top_help)

    add = parser.add_argument_group("devices and disk").add_argument
    dtype_help = f"of the target, and of the drafter's forward and backward (default {d['compute_dtype']})"
    add("--compute-dtype", choices=("float32", "bfloat16"), help=dtype_help)
    mesh_help = "devices to split over: texts of a step over DATA of them, weights over MODEL (default: one device)"
    add("--mesh", type=mesh_shape, metavar="DATAxMODEL", help=mesh_help)
    features_help = "folder of the target's features, which runs can share (default: features/ in --out)"
    add("--features", type=folder, metavar="DIR", help=features_help)
    feature_help = "of features on disk (default %(default)s)"
    add("--feature-dtype", choices=("float32", "bfloat16"), default="float32", help=feature_help)

    add = parser.add_argument_group("reports").add_argument
    add("--log-every", type=whole(1), default=10, metavar="N", help="steps (default %(default)s)")
    add("--eval-every", type=whole(1), default=500, metavar="N", help="steps (default %(default)s)")
    add("--checkpoint-every", type=whole(1), default=250, metavar="N", help="steps (default %(default)s)")
    tau_help = "held-out prompts that an evaluation decodes for tau (default %(default)s)"
    add("--tau-prompts", type=whole(0), default=8, metavar="N", help=tau_help)
    add("--tau-tokens", type=whole(2), default=64, metavar="N", help="new tokens of each (default %(default)s)")
    add("--tensorboard", action="store_true", help="event files in --out/tensorboard (needs tensorboardX)")

    add = parser.add_argument_group("recipe").add_argument
    recipe_help = """tiny-pair: a byte-level target and its drafter from nothing, in minutes, with --out and flags of
    the new drafter's shape and of its optimization. draft-opd: the drafter of --init learns from its own drafts.
    FILE.toml, or the name of one in the package (%s): flags, of which the command line's own win"""
    add("--recipe", metavar="RECIPE", help=recipe_help % ", ".join(recipe_names()))
    add("--text", type=Path, metavar="FILE", help="tiny-pair: text to learn (default: synthetic documents)")
    add("--model-type", choices=("qwen3", "llama"), help="tiny-pair: of the target (default qwen3)")
    add("--target-steps", type=whole(1), metavar="N", help="tiny-pair: training steps of the target (default 420)")
    o = DraftOPDConfig
    add("--temperature", type=_at_least_0, metavar="T", help=f"draft-opd: of rollouts (default {o.temperature:g})")
    phase_help = f"draft-opd: batches of prompts that are decoded in one go (default {o.rollout_batches})"
    add("--rollout-batches", type=whole(1), metavar="N", help=phase_help)
    add("--passes", type=whole(1), metavar="N", help=f"draft-opd: steps on each of them (default {o.passes})")
    return parser


def _above_0(text: str) -> float:
    value = number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number above 0")
    return value


def _share(text: str) -> float:
    value = number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number from 0 to 1")
    return value


def _at_least_0(text: str) -> float:
    value = number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number >= 0")
    return value


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected layer ids like 1,8,14") from None
