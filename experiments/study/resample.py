"""Bootstrap over prompts: how far a statistic would move had other prompts been drawn."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

SAMPLES = 2000


class Interval(NamedTuple):
    """A statistic and its 95% interval."""

    value: float
    low: float
    high: float


def draws(num_prompts: int, seed: int) -> np.ndarray:
    """How often each prompt counts, [1 + SAMPLES, num_prompts]: row 0 once each, the others resampled.

    Statistics that are computed with the same draws are paired: their ratio or difference is taken
    within each resample. Example, two prompts: rows (1 1), (2 0), (1 1), (0 2), ..
    """
    rng = np.random.default_rng((seed, num_prompts))
    resampled = rng.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=SAMPLES)
    return np.concatenate([np.ones((1, num_prompts), resampled.dtype), resampled])


def interval(values: np.ndarray) -> Interval:
    """Value and percentile interval of a statistic over `draws`, [1 + SAMPLES]; NaN where it has none."""
    resampled = values[1:][np.isfinite(values[1:])]
    if not resampled.size:
        return Interval(float(values[0]), float("nan"), float("nan"))
    low, high = np.percentile(resampled, [2.5, 97.5])
    return Interval(float(values[0]), float(low), float(high))


def ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Their quotient, NaN where the divisor is 0."""
    return np.divide(above, below, out=np.full(np.shape(above), np.nan), where=below != 0)
