"""Schedules: what they choose, against exact fractions; and their errors."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reanchor_jax.config import DecodeConfig
from reanchor_jax.errors import ReanchorError
from reanchor_jax.loop import generate
from reanchor_jax.schedule import hardware_lengths, schedule_blocks
from tests.tiny import make_pair

BLOCK = 16
FLAT = (3.0,) * BLOCK
JUMP_AT_8 = (*(1.0,) * 7, *(4.0,) * 9)
"""Costs of 1 to 16 tokens; the eighth makes verification four times as dear."""


def length(confidence: list[float], costs: tuple[float, ...]) -> int:
    return int(hardware_lengths(jnp.array(confidence, jnp.float32), costs))


def oracle(confidence: list[Fraction], costs: list[int]) -> int:
    """Tokens that are verified, by the definition: extend while tokens per unit of cost improve."""
    survival, expected, tokens = Fraction(1), Fraction(1), 1
    for c in confidence:
        survival *= c
        if not (expected + survival) / costs[tokens] > expected / costs[tokens - 1]:
            break
        expected, tokens = expected + survival, tokens + 1
    return tokens


def test_docstring_example():
    assert length([0.9, 0.5, 0.5], (10.0, 11.0, 12.0, 18.0)) == 3


@pytest.mark.parametrize("confidence", [0.5, 0.9, 1.0])
def test_a_jump_at_8_tokens_is_not_taken(confidence):
    assert length([confidence] * (BLOCK - 1), JUMP_AT_8) == 7  # the anchor and 6 drafts


@pytest.mark.parametrize("confidence", [0.05, 0.5, 1.0])
def test_flat_costs_verify_the_whole_block(confidence):
    assert length([confidence] * (BLOCK - 1), FLAT) == BLOCK


def test_nothing_likely_verifies_the_anchor_alone():
    assert length([0.0] * (BLOCK - 1), FLAT) == 1
    assert length([1e-3] * (BLOCK - 1), tuple(1.0 + 0.1 * n for n in range(BLOCK))) == 1


# Five multiples of 1/4 and costs below 256: every product is exact in float32.
quarters = st.lists(st.integers(0, 4).map(lambda n: Fraction(n, 4)), min_size=5, max_size=5)
rises = st.lists(st.integers(0, 8), min_size=6, max_size=6)


def costs_of(rises: list[int]) -> list[int]:
    return [1 + sum(rises[: n + 1]) for n in range(6)]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(quarters, rises)
def test_equals_exact_arithmetic(confidence, rises):
    costs = costs_of(rises)
    assert length([float(c) for c in confidence], tuple(map(float, costs))) == oracle(confidence, costs)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(quarters, rises, st.integers(0, 4), st.integers(1, 4))
def test_more_confidence_never_verifies_less(confidence, rises, place, more):
    raised = list(confidence)
    raised[place] = min(Fraction(1), raised[place] + Fraction(more, 4))
    costs = tuple(map(float, costs_of(rises)))
    assert length([float(c) for c in raised], costs) >= length([float(c) for c in confidence], costs)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(quarters, rises, st.integers(1, 5), st.integers(1, 3))
def test_a_dearer_token_never_verifies_more(confidence, rises, place, more):
    """All costs from some number of tokens on rise by the same factor: no other step gets dearer or cheaper."""
    costs = [float(c) for c in costs_of(rises)]
    raised = [c * (1 + more) if n >= place else c for n, c in enumerate(costs)]
    values = [float(c) for c in confidence]
    assert length(values, tuple(raised)) <= length(values, tuple(costs))


def test_costs_of_any_size_have_the_same_meaning():
    for scale in (1e-300, 1e-46, 1e39, 1e300):
        assert length([0.9, 0.5, 0.5], tuple(scale * c for c in (10.0, 11.0, 12.0, 18.0))) == 3


def test_blocks_are_scheduled_alike_one_by_one():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(5, BLOCK - 1)), jnp.float32)
    for config in (
        DecodeConfig(schedule="threshold", confidence_threshold=0.4),
        DecodeConfig(schedule="hardware", costs=tuple(1.0 + 0.2 * n for n in range(BLOCK))),
    ):
        together = schedule_blocks(logits, 5, BLOCK, config)
        apart = [int(schedule_blocks(logits[i : i + 1], 1, BLOCK, config)[0]) for i in range(5)]
        assert together.tolist() == apart and len(set(apart)) > 1
    assert schedule_blocks(None, 5, BLOCK, DecodeConfig()).tolist() == [BLOCK] * 5


def test_threshold_ends_before_the_first_draft_below_it():
    logits = jnp.log(jnp.array([[0.9 / 0.1, 0.6 / 0.4, 0.3 / 0.7, 0.9 / 0.1]]))
    lengths = {
        t: int(schedule_blocks(logits, 1, 5, DecodeConfig(schedule="threshold", confidence_threshold=t))[0])
        for t in (0.0, 0.2, 0.5, 0.8, 0.95)
    }
    assert lengths == {0.0: 5, 0.2: 5, 0.5: 3, 0.8: 2, 0.95: 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "threshold"}, "no confidence head"),
        ({"schedule": "threshold", "confidence_threshold": 1.5}, "confidence_threshold is 1.5"),
        ({"schedule": "sometimes"}, "schedule is 'sometimes'"),
        ({"schedule": "hardware"}, "costs is None"),
        ({"schedule": "hardware", "costs": (1.0, 2.0)}, "costs is (1.0, 2.0)"),
        ({"schedule": "hardware", "costs": [1.0, 2.0, 3.0, 4.0]}, "expected a tuple"),
        ({"schedule": "hardware", "costs": (1.0, 0.0, 1.0, 1.0)}, "above 0"),
        ({"schedule": "hardware", "costs": (1.0, float("nan"), 1.0, 1.0)}, "above 0"),
    ],
)
def test_errors(changes, message):
    pair = make_pair(4)
    config = dataclasses.replace(DecodeConfig(), **changes)
    with pytest.raises(ReanchorError, match=message.replace("(", r"\(").replace(")", r"\)")):
        generate(pair, jnp.array([1]), jnp.int32(1), key=jax.random.key(0), config=config, max_new_tokens=4)
