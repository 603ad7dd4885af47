"""The command line of every experiment, and the run behind it."""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from experiments.study.experiment import Experiment, with_plain
from experiments.study.pairs import Networks, fingerprint, load_networks
from experiments.study.prompts import Prompt, encode_prompts, load_datasets
from experiments.study.records import Record, Records
from experiments.study.runs import Runner
from experiments.study.settings import Setting, Study
from experiments.study.tables import Table
from reanchor_jax import ReanchorError, __version__
from reanchor_jax.cli import process
from reanchor_jax.cli.compile_cache import use_compile_cache
from reanchor_jax.cli.flags import Parser, whole
from reanchor_jax.cli.models import default_dtype, first_device

_EPILOG = """\
Records go to OUT/records.jsonl, one a prompt and setting; the same command goes on with a run that was
stopped, and experiments with the same --out share the settings that they have in common. Tables
(OUT/NAME.md) and figures (OUT/NAME.svg, .png) are written at the end; `python -m experiments.report OUT`
makes one page of all.

exit codes: 0 done; 1 an answer differs from plain decoding; 2 bad input; 130 interrupted.
"""


def run(experiments: Sequence[Experiment], name: str, description: str | None) -> int:
    """A command as a process; programs that it compiles are kept on disk."""

    def program() -> int:
        use_compile_cache()
        return main(experiments, name, description or "", sys.argv[1:])

    return process.run(
        program,
        interrupted="interrupted; the same command goes on from here",
    )


def main(experiments: Sequence[Experiment], name: str, description: str, argv: Sequence[str]) -> int:
    """Parses, decodes what no record has, writes tables and figures.

    Raises:
      ReanchorError: bad input, or records of another study.
    """
    options = _parser(experiments, name, description).parse_args(argv)
    experiments = [each for each in experiments if each.name in (options.only or [each.name])]
    variants = dict(_variant(text) for text in options.variants)
    dtype = jnp.dtype(options.dtype or default_dtype())
    datasets = load_datasets(options.prompts, options.datasets, options.pair, options.samples, options.seed)
    networks = load_networks(options.pair, variants, dtype)
    room = networks.pair.target.config.max_position_embeddings - options.max_new_tokens
    prompts, too_long = encode_prompts(
        datasets,
        networks.tokenizer,
        samples=options.samples,
        max_prompt=min(options.max_prompt, room),
        thinking=options.thinking,
    )
    console = Console(stderr=True)
    for dataset, number in too_long.items():
        if number:
            console.print(f"{dataset}: left out {number} prompts longer than --max-prompt", highlight=False)
    study = Study(
        pair=",".join(_source_name(source) for source in options.pair.split(",")),
        target=fingerprint(networks.pair.target),
        block_size=networks.drafter.config.block_size,
        head=type(networks.drafter.config.head).__name__,
        variants={each: drafter.config.block_size for each, drafter in networks.variants.items()},
        dtype=dtype.name,
        device=_device(),
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        nodes=options.nodes,
        chat_template=networks.tokenizer is not None and networks.tokenizer.has_chat_template,
        thinking=options.thinking,
    )
    records = Records(options.out, study)
    settings = with_plain([setting for each in experiments for setting in each.settings(study)])
    decode(networks, study, settings, prompts, records, console)
    return report(experiments, records, options.out)


def decode(
    networks: Networks,
    study: Study,
    settings: Sequence[Setting],
    prompts: Sequence[Prompt],
    records: Records,
    console: Console,
) -> None:
    """Adds the records that are missing, prompt by prompt, so that all settings share a machine's moods."""
    runner, made = Runner(networks, study), _made()
    drafters = {name: fingerprint(drafter) for name, drafter in [("", networks.drafter), *networks.variants.items()]}
    _check_drafters(records, drafters)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, speed_estimate_period=300) as bar:
        task = bar.add_task("decoding", total=len(settings) * len(prompts))
        start, decoded = time.monotonic(), 0
        for number, prompt in enumerate(prompts, start=1):
            for setting in settings:
                bar.update(task, description=f"{prompt.dataset} {prompt.row}: {setting.name[:48]}")
                if records.get(setting.name, prompt.dataset, prompt.row, prompt.fingerprint) is None:
                    records.add(_record(runner, study, setting, prompt, records, drafters[setting.drafter], made))
                    decoded += 1
                bar.advance(task)
            if decoded and not console.is_terminal:
                spent = time.monotonic() - start
                left = spent / number * (len(prompts) - number)
                console.print(f"{number} of {len(prompts)} prompts, {spent:.0f} s, about {left:.0f} s left")


def _record(
    runner: Runner,
    study: Study,
    setting: Setting,
    prompt: Prompt,
    records: Records,
    drafter: str,
    made: dict[str, Any],
) -> Record:
    reference = records.get(setting.plain.name, prompt.dataset, prompt.row)
    plain_ids = None if reference is None else reference["token_ids"]
    counts = runner.run(setting, prompt, plain_ids or ())
    return {
        "study": dataclasses.asdict(study),
        "setting": setting.name,
        "config": setting.changes,
        "drafter": "" if setting.config.method == "ar" else drafter,
        "dataset": prompt.dataset,
        "row": prompt.row,
        "prompt": prompt.fingerprint,
        "prompt_tokens": len(prompt.ids),
        **counts,
        "equal": plain_ids is None or counts["token_ids"] == plain_ids,
        "made": made,
    }


def report(experiments: Sequence[Experiment], records: Records, folder: Path) -> int:
    """Writes and prints the tables; 1 where an answer differs from plain decoding."""
    folder.mkdir(parents=True, exist_ok=True)
    names = set[str]()
    for experiment in experiments:
        parts = experiment.write(records, folder)
        names |= {setting.name for setting in experiment.settings(records.study)}
        print(f"\n{experiment.title}\n" if parts else f"\n{experiment.title}: no setting of it here\n")
        for part in parts:
            if isinstance(part, Table):
                print(part.markdown())
    differing = [record for record in records if record["setting"] in names and not record["equal"]]
    for record in differing[:5]:
        print(f"differs from plain decoding: {record['setting']}, {record['dataset']} row {record['row']}")
    return 1 if differing else 0


def _check_drafters(records: Records, drafters: dict[str, str]) -> None:
    for record in records:
        name = record["setting"].partition("drafter=")[2].partition(" ")[0]
        if record["drafter"] and name in drafters and record["drafter"] != drafters[name]:
            raise ReanchorError(
                f"--out holds records of another drafter{f' named {name}' if name else ''}: {record['drafter']}, "
                f"this run's is {drafters[name]}; use another --out"
            )


def _variant(text: str) -> tuple[str, str]:
    name, equals, source = text.partition("=")
    if not (name and equals and source) or " " in name:
        raise ReanchorError(f"--variants has {text}; expected NAME=DRAFTER")
    return name, source


def _source_name(source: str) -> str:
    """A hub id as it is; of a path, which is another one on each machine, the last part."""
    return Path(source).resolve().name if Path(source).exists() else source


def _device() -> str:
    """Platform and model: what times depend on."""
    device = first_device()
    if device.platform != "cpu":
        return f"{jax.device_count()} {device.device_kind}"
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} {'core' if cores == 1 else 'cores'} of {model}"


def _made() -> dict[str, Any]:
    """What made a record: versions and the source's commit."""
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout.strip()
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax")}
    return {
        "commit": (commit or "unknown") + ("+changes" if changed else ""),
        "versions": {"reanchor_jax": __version__, "python": platform.python_version(), **versions},
    }


def _parser(experiments: Sequence[Experiment], name: str, description: str) -> Parser:
    parser = Parser(prog=f"python -m experiments.{name}", description=description, epilog=_EPILOG)
    add = parser.add_argument
    add("--pair", required=True, help="TARGET,DRAFTER; or smollm2-135m; or a folder of the tiny pair's recipe")
    add("--prompts", nargs="+", required=True, help="JSONL files or folders; `hub`; or `synthetic` (the tiny pair's)")
    add("--datasets", nargs="+", default=[], metavar="NAME", help="datasets to take, in this order (default: all)")
    add("--samples", type=whole(1), default=100, help="prompts of each dataset (default 100)")
    add("--seed", type=whole(0), default=0, help="of shuffles, keys and the bootstrap (default 0)")
    add("--max-new-tokens", type=whole(2), default=256, help="of each answer (default 256)")
    add("--max-prompt", type=whole(1), default=1024, help="longer prompts are left out (default 1024 tokens)")
    names = [each.name for each in experiments]
    add("--only", nargs="+", choices=names, metavar="EXPERIMENT", help=f"some of {', '.join(names)}")
    add("--out", type=Path, default=Path("runs/experiments"), help="folder of records, tables and figures")
    add("--nodes", type=whole(1), help="node budget where it is not varied (default: none, as in the paper)")
    add("--variants", nargs="+", default=[], metavar="NAME=DRAFTER", help="other drafters, for drafter_variants")
    add("--dtype", choices=("float32", "bfloat16"), help="default: float32 on CPU, bfloat16 on accelerators")
    thinking = parser.add_mutually_exclusive_group()
    add_thinking = thinking.add_argument
    add_thinking("--thinking", dest="thinking", action="store_true", default=None, help="chat template's thinking on")
    add_thinking("--no-thinking", dest="thinking", action="store_false", help="off (default: the template's own)")
    return parser
