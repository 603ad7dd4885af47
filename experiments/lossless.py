"""Losslessness and tau on held-out prompts of public benchmarks.

    python -m experiments.lossless --prompts DIR [--out FILE.jsonl] [--temperature 0 1] [--attach earliest]

Decodes every prompt plainly, then by chain and ReAnchor under each draft rule with the same key,
and compares token for token. DIR holds JSONL files (`turns`); of each, the first rows after
`random.Random(0).shuffle` are taken. One JSON line per prompt and setting is appended as it
comes; a stopped run goes on where it was. Prints tau per task, and how many answers were equal.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

from reanchor_jax import DecodeConfig, Pair, ReanchorError, generate, load_pair
from reanchor_jax.cli import process
from reanchor_jax.config import AttachRule, DraftRule, Schedule
from reanchor_jax.default_pair import DEFAULT_PAIR, default_target_path
from reanchor_jax.drafter import Drafter
from reanchor_jax.files import write_whole
from reanchor_jax.pair import block_size
from reanchor_jax.profile import load_profile
from reanchor_jax.tokenizer import ChatTokenizer, load_tokenizer

TASKS = ("gsm8k", "humaneval", "mbpp", "mt-bench", "alpaca")


def held_out_prompts(
    folder: Path, tasks: list[str], per_task: int, tokenizer: ChatTokenizer, size: int
) -> Iterator[tuple[str, int, list[int]]]:
    """Task, row number and ids of the first prompts of at most `size` tokens in the held-out rows."""
    for task in tasks:
        path = folder / f"{task}.jsonl"
        if not path.is_file():
            raise ReanchorError(f"{path} does not exist; expected a JSONL file of prompts for each task")
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        random.Random(0).shuffle(rows)
        taken = 0
        for index, row in enumerate(rows[:100]):
            ids = tokenizer.encode_chat([{"role": "user", "content": row["turns"][0]}])
            if len(ids) <= size and taken < per_task:
                taken += 1
                yield task, index, ids


def settings(
    temperatures: list[float],
    draft_rules: list[DraftRule],
    attach_rules: list[AttachRule],
    nodes: int | None,
    offsets: int | None,
    schedule: dict[str, Any],
) -> dict[str, DecodeConfig]:
    """Names and configs; plain decoding of a temperature comes before what is held against it."""
    cut = ""
    if schedule["schedule"] == "threshold":
        cut = f" threshold={schedule['confidence_threshold']:g}"
    if schedule["schedule"] == "hardware":
        costs = hashlib.sha256(repr(schedule["costs"]).encode()).hexdigest()[:6]
        cut = f" costs={costs}"
    budget = "".join(f" {name}={n}" for name, n in (("nodes", nodes), ("offsets", offsets)) if n is not None)
    table = {}
    for temperature in temperatures:
        table[f"ar T={temperature:g}"] = DecodeConfig(method="ar", temperature=temperature)
        rules: list[DraftRule] = draft_rules if temperature else ["greedy"]
        for rule in rules:
            table[f"dflash T={temperature:g} {rule}{cut}"] = DecodeConfig(
                method="dflash", temperature=temperature, draft_rule=rule, **schedule
            )
            for attach in attach_rules:
                table[f"reanchor {attach} T={temperature:g} {rule}{budget}{cut}"] = DecodeConfig(
                    temperature=temperature, draft_rule=rule, attach=attach, nodes=nodes, offsets=offsets, **schedule
                )
    return table


def digest(drafter: Drafter) -> str:
    """A short hash of config and weights, so that records of two drafters never mix."""
    sha = hashlib.sha256(repr(drafter.config).encode())
    for leaf in jax.tree.leaves(drafter):
        sha.update(np.asarray(leaf).tobytes())
    return sha.hexdigest()[:12]


def read_records(path: Path, run_id: dict[str, Any]) -> dict[tuple[str, str, int], Any]:
    """Records of an earlier start of this run by setting, task and row; makes the folder of `path`.

    Raises:
      ReanchorError: `path` holds another run.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {}
    if path.exists():
        *lines, unfinished = path.read_text(encoding="utf-8").split("\n")
        if unfinished:  # a run that was killed while it wrote
            write_whole(path, "".join(line + "\n" for line in lines))
        for line in lines:
            record = json.loads(line)
            if {name: record.get(name) for name in run_id} != run_id:
                raise ReanchorError(f"{path} holds another run; expected {run_id}: take another --out")
            done[record["setting"], record["task"], record["row"]] = record
    return done


def run_setting(
    pair: Pair, name: str, config: DecodeConfig, prompts: list[tuple[str, int, list[int]]], size: int,
    run_id: dict[str, Any], done: dict[tuple[str, str, int], Any], out: Path,
) -> None:  # fmt: skip
    """Decodes the prompts that are not in `done`, appending one record each."""
    todo = [prompt for prompt in prompts if (name, prompt[0], prompt[1]) not in done]
    if not todo:
        return
    run = jax.jit(functools.partial(generate, config=config, max_new_tokens=run_id["new_tokens"]))
    compiled = None
    for task, index, ids in track(todo, description=name):
        padded = np.zeros(size, np.int32)
        padded[: len(ids)] = ids
        args = (pair, jnp.asarray(padded), jnp.int32(len(ids)))
        key = jax.random.key(index)
        if compiled is None:
            compiled = run.lower(*args, key=key).compile()
        start = time.monotonic()
        result = jax.device_get(compiled(*args, key=key))
        rounds = int(result.rounds)
        record = {
            **run_id,
            "setting": name,
            "task": task,
            "row": index,
            "token_ids": result.tokens[: result.num_tokens].tolist(),
            "committed_per_round": result.counts.committed[:rounds].tolist(),
            "nodes_per_round": result.counts.nodes[:rounds].tolist(),
            "seconds": round(time.monotonic() - start, 3),
        }
        done[name, task, index] = record
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def report(table: dict[str, DecodeConfig], results: list[dict[str, Any]], tasks: list[str]) -> bool:
    """Prints tau per task and the number of equal answers; returns whether all are equal."""
    answers = {(r["setting"], r["task"], r["row"]): r["token_ids"] for r in results}
    print(f"| setting | {' | '.join(tasks)} | mean tau | nodes | ms a token | equal to ar |")
    print(f"|{'---|' * (len(tasks) + 5)}")
    all_equal, plain = True, ""
    for name, config in table.items():
        records = [record for record in results if record["setting"] == name]
        milliseconds = 1000 * sum(r["seconds"] for r in records) / sum(len(r["token_ids"]) for r in records)
        if config.method == "ar":
            plain = name
            print(f"| {name} |{' |' * (len(tasks) + 2)} {milliseconds:.0f} | |")
            continue
        taus = []
        for task in tasks:
            rounds = [n for record in records if record["task"] == task for n in record["committed_per_round"]]
            taus.append(float(np.mean(rounds)) if rounds else float("nan"))
        equal = sum(r["token_ids"] == answers[plain, r["task"], r["row"]] for r in records)
        all_equal &= equal == len(records)
        nodes = float(np.mean([n for record in records for n in record["nodes_per_round"]]))
        cells = " | ".join(f"{tau:.2f}" for tau in taus)
        measured = f"{np.mean(taus):.2f} | {nodes:.0f} | {milliseconds:.0f}"
        print(f"| {name} | {cells} | {measured} | {equal} of {len(records)} |")
    return all_equal


def main() -> int:
    """Exit code 0: all answers equal; 1: some differ; 2: bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/lossless.jsonl"))
    parser.add_argument("--drafter", default=DEFAULT_PAIR)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--per-task", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompt-size", type=int, default=256, help="longer prompts are left out")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--draft-rule", nargs="+", default=get_args(DraftRule), choices=get_args(DraftRule))
    parser.add_argument("--attach", nargs="+", default=["earliest", "fallback"], choices=get_args(AttachRule))
    parser.add_argument("--nodes", type=int, help="node budget (default: four blocks)")
    parser.add_argument("--offsets", type=int, help="largest offset (default: B - 1)")
    parser.add_argument("--schedule", default="none", choices=get_args(Schedule))
    parser.add_argument("--confidence-threshold", type=float, default=0.5)
    parser.add_argument("--profile", type=Path, help="costs for --schedule hardware, measured by reanchor_jax.profile")
    options = parser.parse_args()
    if (options.schedule == "hardware") != (options.profile is not None):
        raise ReanchorError("--schedule hardware and --profile FILE go together; reanchor_jax.profile measures FILE")
    tokenizer = load_tokenizer(default_target_path())
    assert tokenizer is not None
    size = options.prompt_size
    prompts = list(held_out_prompts(options.prompts, options.tasks, options.per_task, tokenizer, size))
    if not prompts:
        raise ReanchorError(f"{options.prompts} has no prompt of at most {size} tokens; raise --prompt-size")
    pair = load_pair(DEFAULT_PAIR, options.drafter)
    assert pair.drafter is not None
    run_id = {"drafter": digest(pair.drafter), "new_tokens": options.new_tokens}
    done = read_records(options.out, run_id)
    schedule: dict[str, Any] = {"schedule": options.schedule, "confidence_threshold": options.confidence_threshold}
    if options.schedule == "hardware":
        schedule["costs"] = load_profile(options.profile).costs(block_size(pair, DecodeConfig()))
    table = settings(options.temperature, options.draft_rule, options.attach, options.nodes, options.offsets, schedule)
    for name, config in table.items():
        run_setting(pair, name, config, prompts, size, run_id, done, options.out)
    asked = {(task, index) for task, index, _ in prompts}
    return 0 if report(table, [r for r in done.values() if (r["task"], r["row"]) in asked], options.tasks) else 1


if __name__ == "__main__":
    sys.exit(process.run(main))
