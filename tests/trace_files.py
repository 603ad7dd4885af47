"""Traces written by hand and by a random generator that shares no code with the package."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SETTINGS = {"target": "T", "drafter": "D", "method": "reanchor", "attach": "earliest", "retain": "baseline"}


def run_line(**settings: Any) -> dict[str, Any]:
    return {"kind": "run", "format": 1, "settings": {**SETTINGS, **settings}}


def prompt_line(index: int = 0, turn: int = 0, prompt_ids: Sequence[int] = (1, 2, 3)) -> dict[str, Any]:
    return {"kind": "prompt", "index": index, "turn": turn, "prompt_ids": list(prompt_ids)}


def hand_rounds() -> list[dict[str, Any]]:
    """Two rounds of block size 4 behind a prompt of 3 tokens; the origins of their tokens:

    10 out of prefill | 11 baseline, 14 15 refinement, 16 extension, 17 the target's own
    | 20 baseline, 30 the target's own, beyond the limit

        10 - 11 - 12 - 13             17 - 20 - 21 - 22
                `- 14 - 15 - 16
    """
    return [
        {
            "kind": "round",
            "start": 1,
            "anchor": 3,
            "blocks": [
                {"offset": 0, "tokens": [10, 11, 12, 13], "length": 4, "site": 0},
                {"offset": 1, "tokens": [11, 14, 15, 16], "length": 4, "site": 1},
                {"offset": 2, "tokens": [99, 14, 15, 16], "length": 4, "site": None},
            ],
            "trie": {
                "tokens": [10, 11, 12, 13, 14, 15, 16],
                "parents": [-1, 0, 1, 2, 1, 4, 5],
                "depths": [0, 1, 2, 3, 2, 3, 4],
                "blocks": [0, 0, 0, 0, 1, 1, 1],
                "target_tokens": [11, 14, 98, 98, 15, 16, 17],
            },
            "path": [0, 1, 4, 5, 6],
            "accepted": 4,
            "committed": 5,
            "clipped": 0,
            "cut": 0,
            "retained": 0,
        },
        {
            "kind": "round",
            "start": 6,
            "anchor": 8,
            "blocks": [{"offset": 0, "tokens": [17, 20, 21, 22], "length": 4, "site": 0}],
            "trie": {
                "tokens": [17, 20, 21, 22],
                "parents": [-1, 0, 1, 2],
                "depths": [0, 1, 2, 3],
                "blocks": [0, 0, 0, 0],
                "target_tokens": [20, 30, 97, 97],
            },
            "path": [0, 1],
            "accepted": 1,
            "committed": 2,
            "clipped": 1,
            "cut": 0,
            "retained": 2,
        },
    ]


def hand_trace() -> list[dict[str, Any]]:
    tokens = [10, 11, 14, 15, 16, 17, 20]
    pieces = {str(token): f" t{token}" for token in (1, 2, 3, *range(10, 23), 30, 97, 98, 99)}
    end = {"kind": "end", "token_ids": tokens, "finish_reason": "length"}
    return [run_line(), prompt_line(), *hand_rounds(), end, {"kind": "pieces", "pieces": pieces}]


def random_rounds(
    count: int, block_size: int, seed: int, vocab: int = 500, prompt_len: int = 3
) -> list[dict[str, Any]]:
    """Rounds that follow each other, with the rule `baseline`; each has every shifted block that it can."""
    rng = random.Random(seed)
    start, anchor_token, num_offsets, lines = 1, rng.randrange(vocab), 0, []
    for _ in range(count):
        blocks = [[anchor_token, *(rng.randrange(vocab) for _ in range(block_size - 1))]]
        sites: list[int | None] = [0]
        for d in range(1, num_offsets + 1):
            site = rng.choice([None, d, rng.randrange(1, block_size)])
            first = rng.randrange(vocab) + vocab if site is None else blocks[0][site]
            blocks.append([first, *(rng.randrange(vocab) for _ in range(block_size - 1))])
            sites.append(site)
        paths = [blocks[0][:site] + block for site, block in zip(sites, blocks, strict=True) if site is not None]
        owners = [d for d, site in enumerate(sites) if site is not None]
        nodes: dict[tuple[int, ...], tuple[int, int]] = {}  # prefix: number, block
        for d, path in zip(owners, paths, strict=True):
            for depth in range(len(path)):
                nodes.setdefault(tuple(path[: depth + 1]), (len(nodes), d))
        prefixes = list(nodes)
        chosen = rng.choice(paths)[: 1 + min(rng.randrange(2 * block_size), rng.randrange(2 * block_size))]
        accepted = [tuple(chosen[: k + 1]) for k in range(len(chosen))]
        wrong = 3 * vocab  # a token that no draft has
        behind = {prefix: longer[-1] for prefix, longer in itertools.pairwise(accepted)}
        target = [behind.get(prefix, wrong if prefix != accepted[-1] else rng.randrange(vocab) + 2 * vocab)
                  for prefix in prefixes]  # fmt: skip
        path_nodes = [nodes[prefix][0] for prefix in accepted]
        num_offsets = max(block_size - len(accepted), 0)
        lines.append(
            {
                "kind": "round",
                "start": start,
                "anchor": prompt_len + start - 1,
                "blocks": [
                    {"offset": d, "tokens": block, "length": block_size, "site": site}
                    for d, (block, site) in enumerate(zip(blocks, sites, strict=True))
                ],
                "trie": {
                    "tokens": [prefix[-1] for prefix in prefixes],
                    "parents": [nodes[prefix[:-1]][0] if prefix[:-1] else -1 for prefix in prefixes],
                    "depths": [len(prefix) - 1 for prefix in prefixes],
                    "blocks": [nodes[prefix][1] for prefix in prefixes],
                    "target_tokens": target,
                },
                "path": path_nodes,
                "accepted": len(accepted) - 1,
                "committed": len(accepted),
                "clipped": 0,
                "cut": 0,
                "retained": num_offsets,
            }
        )
        start += len(accepted)
        anchor_token = target[path_nodes[-1]]
    return lines


def committed_ids(rounds: list[dict[str, Any]]) -> list[int]:
    """First token and all committed ones, clipped ones too."""
    ids = [rounds[0]["trie"]["tokens"][0]]
    return ids + [entry["trie"]["target_tokens"][node] for entry in rounds for node in entry["path"]]


def random_trace(num_texts: int, num_rounds: int, block_size: int, vocab: int = 500) -> list[dict[str, Any]]:
    """Texts of random words."""
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    lines = [run_line()]
    for index in range(num_texts):
        rounds = random_rounds(num_rounds, block_size, seed=index, vocab=vocab)
        end = {"kind": "end", "token_ids": committed_ids(rounds), "finish_reason": "stop"}
        lines += [prompt_line(index), *rounds, end]
    pieces = {str(t): " " + "".join(rng.choices(letters, k=rng.randrange(1, 9))) for t in range(3 * vocab + 1)}
    return [*lines, {"kind": "pieces", "pieces": pieces}]


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
