"""Recipes: TOML files with the flags of a training run, and what its cost is computed from.

[train]    flags of `python -m reanchor_jax.train`, with underscores; the command line's own win
[data]     how much text there will be, for the cost alone
[devices]  what it will run on, for the cost alone
[config]   what shapes depend on in the target's config.json, for the cost alone

A file is untrusted input: its flags are read by the parser of the command line, all else field by field.
"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from typing import Any

from reanchor_jax.checkpoint.fields import Fields
from reanchor_jax.errors import ReanchorError

FOLDER = Path(__file__).parent / "recipes"
MAX_BYTES = 1 << 20
OF_THE_USER = (
    *("help", "recipe", "out", "prompts", "answers", "held_out_answers", "features"),
    *("text", "model_type", "target_steps", "temperature", "rollout_batches", "passes"),
)
"""Flags that no file sets: where things lie, and those of the built-in recipes."""


def recipe_names() -> list[str]:
    """Names of the recipes in the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read_recipe(source: str) -> Fields:
    """The tables of a recipe, by its name or its file.

    Raises:
      ReanchorError: no such recipe, not TOML, an unknown table.
    """
    path = FOLDER / f"{source}.toml" if source in recipe_names() else Path(source)
    if path.suffix != ".toml":
        raise ReanchorError(f"--recipe is {source!r:.60}; expected FILE.toml or one of {', '.join(recipe_names())}")
    try:
        if not path.is_file():  # a pipe would keep us waiting
            raise ReanchorError(f"{path} is no file; expected a recipe, or one of {', '.join(recipe_names())}")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ReanchorError(f"{path} has more than {MAX_BYTES} bytes; expected a recipe")
        tables = tomllib.loads(data.decode("utf-8"))
    except OSError as error:
        raise ReanchorError(f"{path} cannot be read: {error.strerror or error}; check the name") from None
    except ReanchorError:
        raise
    except (ValueError, RecursionError) as error:
        raise ReanchorError(f"{path} is not TOML: {' '.join(str(error).split())[:120]}; write it again") from None
    fields = Fields(tables, str(path))
    fields.ignore("train", "data", "devices", "config")
    fields.finish()
    return fields


def recipe_flags(recipe: Fields, parser: argparse.ArgumentParser) -> list[str]:
    """The table [train] as a command line, without what is the user's.

    Every value becomes the text of its own flag, `--name=value`, so that it can be nothing else.

    Raises:
      ReanchorError: an unknown flag, or a value of another type or out of range.
    """
    table = recipe.section("train")
    known = {action.dest: action for action in parser._actions if action.dest not in OF_THE_USER}
    argv = []
    for name, value in table.data.items():
        flag = f"--{name.replace('_', '-')}"
        if name not in known:
            raise ReanchorError(f"{table.where}: {name!r:.40} is no setting of a recipe; expected flags of --help")
        if known[name].nargs == 0:
            argv += [flag] * table.boolean(name)
        else:
            argv.append(f"{flag}={_text(table, name, value)}")
    try:
        parser.parse_args([*argv, "--out=."])
    except ReanchorError as error:
        raise ReanchorError(f"{table.where}: {error}") from None
    return argv


def _text(table: Fields, name: str, value: Any) -> str:
    if isinstance(value, list):
        return ",".join(str(number) for number in table.integers(name, 0, 1 << 31))
    is_line = isinstance(value, str) and value.isprintable()
    is_number = isinstance(value, float) or (type(value) is int and abs(value) < 1 << 63)
    if not is_line and not is_number:
        raise table.fail(name, value, "a number, a line of text or a list of integers")
    return str(value)
