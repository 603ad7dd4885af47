"""Rotary scalings against values that transformers computed (`tests/parity` compares with it live)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from reanchor_jax.config import LinearScaling, RopeConfig, RopeScaling, YarnScaling
from reanchor_jax.rope import attention_factor, make_rope, rope_frequencies

PLAIN = YarnScaling(
    factor=4.0,
    original_max_position_embeddings=512,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=True,
    attention_factor=None,
    mscale=None,
    mscale_all_dim=None,
)
GIVEN = YarnScaling(
    factor=8.0,
    original_max_position_embeddings=512,
    beta_fast=16.0,
    beta_slow=2.0,
    truncate=False,
    attention_factor=None,
    mscale=0.7,
    mscale_all_dim=0.3,
)


@pytest.mark.parametrize(
    ("scaling", "frequencies", "factor"),
    [
        (
            LinearScaling(factor=4.0),
            [0.25, 0.07905694, 0.025, 7.905695e-3, 2.5e-3, 7.905695e-4, 2.5e-4, 7.905695e-5],
            1.0,
        ),
        (PLAIN, [1, 0.2569351, 0.0625, 0.01383497, 2.5e-3, 7.905695e-4, 2.5e-4, 7.905695e-5], 1.138629436111989),
        (
            GIVEN,
            [1, 0.3162278, 0.07160846, 7.324998e-3, 1.25e-3, 3.952847e-4, 1.25e-4, 3.952847e-5],
            1.0782934613857693,
        ),
    ],
)
def test_recorded_frequencies(scaling: RopeScaling, frequencies: list[float], factor: float):
    """Head dim 16, base 10000; also beyond the original context, where the tables hold them."""
    config = RopeConfig(theta=1e4, scaling=scaling)
    np.testing.assert_allclose(rope_frequencies(config, 16), frequencies, rtol=1e-6)
    np.testing.assert_allclose(attention_factor(config), factor, rtol=1e-12)
    rope = make_rope(config, 16, jnp.array([0, 3, 700]))
    angles = np.array([[0], [3], [700]]) * np.tile(frequencies, 2)
    np.testing.assert_allclose(rope.cos, factor * np.cos(angles), atol=1e-3)
    np.testing.assert_allclose(rope.sin, factor * np.sin(angles), atol=1e-3)
