"""Synthetic documents for a tiny byte-level target: mostly predictable, now and then free.

Each document follows one of a few templates. Its frame can be drafted for whole blocks; names,
things and numbers are choices that a drafter can only guess, so rejections fall inside blocks
and what was verified behind them is still right, which is what shifted anchors live on.
"""

from __future__ import annotations

import random

NAMES = ("Ada", "Bo", "Cleo", "Dan", "Emil", "Finn", "Gwen", "Hugo", "Iris", "Jon")
THINGS = (
    "apples",
    "boats",
    "coins",
    "drums",
    "forks",
    "kites",
    "lamps",
    "nuts",
    "pears",
    "plums",
    "rings",
    "seals",
    "tents",
    "vases",
    "wheels",
)
COLORS = ("amber", "black", "green", "ivory", "pink", "red", "teal", "white")
PLACES = ("attic", "barn", "cellar", "garden", "harbor", "market", "tower", "valley")


def document(rng: random.Random, min_bytes: int = 224) -> str:
    """One document of at least `min_bytes` ASCII characters."""
    make = rng.choice((_inventory, _trades, _visits, _table, _letters))
    lines = make(rng)
    text = ""
    while len(text) < min_bytes:
        text += next(lines)
    return text


def _inventory(rng: random.Random):
    """Numbered entries with a free color and thing, and fixed words between them."""
    number, place = rng.randint(1, 60), rng.choice(PLACES)
    yield f"List of the {place}:\n"
    while True:
        yield f"Item {number}: {rng.choice(COLORS)} {rng.choice(THINGS)}, stored in the {place}.\n"
        number += 1


def _trades(rng: random.Random):
    """Questions whose answer follows from two free digits."""
    while True:
        giver, taker, thing = rng.choice(NAMES), rng.choice(NAMES), rng.choice(THINGS)
        has, more = rng.randint(1, 5), rng.randint(1, 4)
        yield f"Q: {taker} has {has} {thing} and gets {more} more from {giver}. How many {thing} has {taker} now?\n"
        yield f"A: {taker} has {has} + {more} = {has + more} {thing} now.\n"


def _visits(rng: random.Random):
    """A story in which every sentence repeats what the one before it chose."""
    name, place = rng.choice(NAMES), rng.choice(PLACES)
    while True:
        thing, to = rng.choice(THINGS), rng.choice(PLACES)
        yield f"{name} went to the {place} and found {thing} there. "
        yield f"{name} took the {thing} from the {place} to the {to}. "
        place = to


def _table(rng: random.Random):
    """Rows of a table: a counter, a cycle of colors, a free thing."""
    row, step, start = rng.randint(100, 300), rng.choice((1, 2, 5)), rng.randrange(len(COLORS))
    while True:
        yield f"| row {row} | {COLORS[start % len(COLORS)]:6} | {rng.choice(THINGS):6} |\n"
        row, start = row + step, start + 1


def _letters(rng: random.Random):
    """A letter's phrases in an order that never changes, with a free name in each."""
    to = rng.choice(NAMES)
    while True:
        yield f"Dear {to}, thank you for the {rng.choice(THINGS)}. "
        sender = rng.choice(NAMES)
        yield f"We will meet at the {rng.choice(PLACES)} soon. With kind wishes, {sender}.\n"
        to = sender
