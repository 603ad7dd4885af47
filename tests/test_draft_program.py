"""The lowered program of a drafting call: one backbone, one LM head, whatever the head and the offsets."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from reanchor_jax.config import DecodeConfig, DominoConfig, DSparkConfig, HeadConfig, LMHeadConfig
from reanchor_jax.draft import draft_blocks
from reanchor_jax.prefill import prefill
from tests.tiny import make_pair

BLOCK, VOCAB, WIDTH, RANK = 17, 113, 48, 7
"""17 blocks: the baseline and 16 offsets. Sizes that occur nowhere else in the program."""

HEADS: list[HeadConfig] = [
    LMHeadConfig(),
    DominoConfig(emb_dim=RANK, gru_hidden_dim=11, shift_label=False, pure_draft_prefix_len=1),
    *(
        DSparkConfig(
            markov_rank=RANK, markov_head_type=k, enable_confidence_head=True, confidence_head_with_markov=True
        )
        for k in ("vanilla", "gated", "rnn")
    ),
]


def matmuls(text: str) -> list[tuple[str, str, str]]:
    """Shapes of both operands and the result of every matrix product of a StableHLO text."""
    pattern = r"stablehlo\.dot_general.*: \(tensor<([^>]*)>, tensor<([^>]*)>\) -> tensor<([^>]*)>"
    return re.findall(pattern, text)


@pytest.mark.parametrize("head", HEADS, ids=lambda head: getattr(head, "markov_head_type", None) or type(head).__name__)
def test_one_backbone_call_and_one_lm_head_product(head):
    pair = make_pair(BLOCK, head=head, vocab_size=VOCAB, width=WIDTH, tied=False)
    config = DecodeConfig()
    start = jax.eval_shape(
        lambda pair: prefill(
            pair, jnp.zeros(8, jnp.int32), jnp.int32(8), key=jax.random.key(0), config=config, max_new_tokens=8
        ),
        pair,
    )
    lowered = jax.jit(draft_blocks, static_argnames="config").lower(pair, start, config=config, noise=None)
    products = matmuls(lowered.as_text())
    assert len(products) > 10  # the pattern still finds them

    # The LM head [V, D] meets the features of all drafts of all blocks, once.
    lm_head = f"{VOCAB}x{WIDTH}xf32"
    with_head = [shapes for shapes in products if lm_head in shapes[:2]]
    assert len(with_head) == 1
    result = {int(n) for n in with_head[0][2].removesuffix("xf32").split("x")}
    assert result == {BLOCK - 1, BLOCK, VOCAB}
    # The backbone's layers are one scan, entered once: one product with their MLP's [2D, D] gate and one with its twin.
    gates = [shapes for shapes in products if f"{2 * WIDTH}x{WIDTH}xf32" in shapes[:2]]
    assert len(gates) == 2
    # What runs slot by slot has the correction's rank, never the width, beside the vocabulary.
    corrections = [shapes for shapes in products if f"{VOCAB}x{RANK}xf32" in shapes[:2]]
    assert len(corrections) == (0 if isinstance(head, LMHeadConfig) else 1)
