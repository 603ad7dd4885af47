"""The paper's datasets from the Hugging Face hub, through the optional package `datasets`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from reanchor_jax.cli.prompts import Prompt
from reanchor_jax.errors import ReanchorError

_BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


class Source(NamedTuple):
    """Where a dataset lies, and the user's turns that a row of it gives."""

    path: str
    config: str | None
    """Or, where the path is `json`, its files."""
    split: str
    turns: Callable[[dict[str, Any]], list[str]]


def _alpaca(row: dict[str, Any]) -> list[str]:
    return [f"{row['instruction']}\n\n{row['input']}" if row["input"] else row["instruction"]]


def _humaneval(row: dict[str, Any]) -> list[str]:
    task = "Write a solution to the following problem and make sure that it passes the tests:"
    return [f"{task}\n```python\n{row['prompt']}\n```"]


SOURCES = {
    "gsm8k": Source("openai/gsm8k", "main", "test", lambda row: [row["question"] + _BOXED]),
    "math500": Source("HuggingFaceH4/MATH-500", None, "test", lambda row: [row["problem"] + _BOXED]),
    "aime25": Source("math-ai/aime25", None, "test", lambda row: [row["problem"] + _BOXED]),
    "humaneval": Source("openai/openai_humaneval", None, "test", _humaneval),
    "mbpp": Source("google-research-datasets/mbpp", "sanitized", "test", lambda row: [row["prompt"]]),
    "livecodebench": Source(
        "json",  # the dataset's own loader is a script, which newer versions of `datasets` refuse
        "hf://datasets/livecodebench/code_generation_lite/test*.jsonl",
        "train",
        lambda row: [f"Write a Python program that solves this.\n\n{row['question_content']}\n\n{row['starter_code']}"],
    ),
    "mt-bench": Source("HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: list(row["prompt"])),
    "alpaca": Source("tatsu-lab/alpaca", None, "train", _alpaca),
}
"""By the names that tables use. Prompt texts of math and code tasks are those usual for DFlash."""


def hub_rows(name: str) -> list[Prompt]:
    """All rows of a dataset.

    Raises:
      ReanchorError: an unknown name, `datasets` is not installed, the hub does not give the dataset.
    """
    if name not in SOURCES:
        raise ReanchorError(f"--datasets has {name}; expected one of {', '.join(SOURCES)} for --prompts hub")
    source = SOURCES[name]
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise ReanchorError(
            "--prompts hub needs the package datasets; pip install -e '.[experiments]', or give JSONL files"
        ) from None
    try:
        where = {"data_files": source.config} if source.path == "json" else {"name": source.config}
        rows = datasets.load_dataset(source.path, **where, split=source.split)
        return [Prompt(i, f"{name} row {i}", tuple(source.turns(row)), (), True) for i, row in enumerate(rows)]
    except Exception as error:  # network, a renamed dataset, a renamed column: foreign code raises anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ReanchorError(f"the hub does not give {source.path} ({name}): {reason}; give a JSONL file") from error
