"""What a model is and how it decodes: frozen, hashable settings, all static under `jax.jit`.

Glossary of shape letters, used in every bracket comment of the package:

    A  blocks drafted in a round, 1 + D_max      L  layers
    B  block size: the anchor and B-1 drafts     N  trie nodes (node 0 is the anchor)
    C  tapped target layers                      P  prompt tokens (padded)
    D  model width                               Q  query heads
    F  MLP width                                 S  cache slots
    G  query heads per key/value head, Q // K    R  repeats of a target's layer pattern
    H  head dim                                  T  query tokens of one forward
    K  key/value heads                           V  vocabulary
                                                 W  longest path, 2B - 1 (one block: B)

Nothing that every checkpoint must say has a default here: a missing value is an error in
`reanchor_jax.checkpoint`, never a guess. What most drafters lack altogether is off by default.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from reanchor_jax.errors import ReanchorError

Method = Literal["ar", "dflash", "reanchor"]
DraftRule = Literal["greedy", "sample", "coupled"]
AttachRule = Literal["earliest", "fixed", "fixed_unmatched", "random", "longest", "fallback"]
MarkovHead = Literal["vanilla", "gated", "rnn"]
Components = Literal["both", "in_block", "extension"]
RetainRule = Literal["baseline", "accepted_path"]
Schedule = Literal["none", "threshold", "hardware"]
Activation = Literal["silu", "gelu_tanh"]
SlidingAttention = Literal["causal", "ignored", "symmetric"]
"""What a drafter's sliding layers see, as distance = query position - key position.

`causal`: 0 <= distance < window, also inside the block. vLLM's and SpecForge's reading, so that of
published checkpoints. `symmetric`: |distance| < window, vLLM's where the file says `causal: false`,
and z-lab's code under flash attention. `ignored`: everything, as full layers do; z-lab's code under
other attention kernels.
"""

LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-30, 1e30
"""Logits divided by a temperature outside these overflow or vanish in float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """The `llama3` rotary scaling: low frequencies are divided by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """The `linear` rotary scaling: all positions are divided by `factor`."""

    factor: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """The `yarn` rotary scaling (arXiv 2309.00071): pairs that turn seldom are slowed, all are scaled.

    The attention factor, by which cosines and sines are multiplied, is `attention_factor` where it
    is given, else a function of `factor` and the two `mscale`s (`reanchor_jax.rope.attention_factor`).
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    """Pairs with more turns than this in the original context are left alone."""
    beta_slow: float
    """Pairs with fewer are divided by `factor`."""
    truncate: bool
    """Round the two bounds outwards to whole pairs."""
    attention_factor: float | None
    mscale: float | None
    mscale_all_dim: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProportionalScaling:
    """Gemma 4's `proportional` rotary embedding: the first pairs turn, the others carry no position."""

    partial_rotary_factor: float
    """Share of the pairs that turn; their frequencies are those of the whole head."""
    factor: float
    """Their frequencies are divided by it."""


RopeScaling = Llama3Scaling | LinearScaling | YarnScaling | ProportionalScaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding over the whole head dim, in halves (`rotate_half` layout)."""

    theta: float
    scaling: RopeScaling | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One decoder layer; targets and drafters share it. What only Gemma 4 has is off by default."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    qk_norm: bool
    """RMS norm over the head dim of queries and keys, before the rotary embedding."""
    attention_bias: bool = False
    """Biases on the query, key, value and output projections."""
    sliding_window: int | None = None
    """Of a target's layer: a query sees positions 0 <= distance < window. A drafter's windows are in
    `DrafterConfig`."""
    activation: Activation = "silu"
    attention_scale: float | None = None
    """What scores are multiplied by; None: head_dim ** -0.5."""
    shared_kv: bool = False
    """Values are the key projection's output, before the keys' norm: there is no value projection."""
    v_norm: bool = False
    """RMS norm, without weights, over the head dim of values."""
    sandwich_norms: bool = False
    """Norms also behind attention and behind the MLP, before each is added to the residual stream."""
    layer_scalar: bool = False
    """The layer's output is multiplied by a stored number."""
    float32_norms: bool = False
    """Norms multiply by their weight before they cast back, not behind it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """A decoder: `llama`, `qwen3`, or the text part of Gemma 4."""

    model_type: str
    vocab_size: int
    num_layers: int
    pattern: tuple[LayerConfig, ...]
    """The layers' repeating pattern: layer n is `pattern[n % len(pattern)]`. Its length divides L."""
    tie_word_embeddings: bool
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Union of the ids in config.json and generation_config.json; may be empty."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by sqrt(hidden_size)."""
    logit_softcap: float | None = None
    """Logits become softcap * tanh(logits / softcap)."""

    @property
    def layer(self) -> LayerConfig:
        """The first layer, for what all layers have in common: width, MLP, query heads, norms."""
        return self.pattern[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LMHeadConfig:
    """DFlash and Draft-OPD: the target's LM head; block position k predicts the token at position k."""

    own_embedding: bool = False
    """The block is read by an embedding of the drafter's own, not by the target's."""
    draft_vocab_size: int | None = None
    """Rows of an LM head of the drafter's own; below the vocabulary's size, with a map to target ids.
    None: the target's head."""
    mask_embedding: bool = False
    """Mask positions read a vector of their own in place of the mask token's embedding."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DominoConfig:
    """Domino: the target's LM head, corrected by a GRU over the block's tokens (paper, algorithm 3)."""

    emb_dim: int
    """Rank of the correction."""
    gru_hidden_dim: int
    shift_label: bool
    """Block position k predicts the token at k + 1, not at k."""
    pure_draft_prefix_len: int
    """Drafts 1 .. this many are not corrected."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkConfig:
    """DSpark: own embedding and LM head, corrected by the token before (paper, algorithm 2).

    Block position k predicts the token at k + 1, so the backbone needs one position less.
    """

    markov_rank: int
    """Rank of the correction; 0 for none."""
    markov_head_type: MarkovHead | None
    """None for rank 0."""
    enable_confidence_head: bool
    confidence_head_with_markov: bool
    """The confidence also reads the correction's row of the token before."""
    confidence_temperatures: tuple[float, ...] | None = None
    """Position-wise calibration: the confidence of draft k is divided by entry k - 1; None for 1."""
    scaled_embedding: bool = False
    logit_softcap: float | None = None
    """As in `TargetConfig`, of the drafter's own embedding and, before the correction, its LM head."""

    @property
    def confidence_rank(self) -> int:
        """How much of the correction the confidence reads."""
        return self.markov_rank if self.confidence_head_with_markov else 0


HeadConfig = LMHeadConfig | DominoConfig | DSparkConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """A block-diffusion drafter: a backbone and a head."""

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    """Tapped target layers; id n is the output of layer n (hidden state n + 1)."""
    target_num_layers: int | None
    """`num_target_layers` of the checkpoint, where it says so."""
    vocab_size: int
    num_layers: int
    layer: LayerConfig
    head: HeadConfig
    sliding_layers: tuple[bool, ...] = ()
    """Which layers have a sliding window; empty: none."""
    sliding_window: int | None = None
    """How many positions it spans; None exactly where no layer slides."""
    sliding_attention: SlidingAttention = "causal"

    @property
    def has_confidence(self) -> bool:
        """Whether the head says how likely each draft is accepted."""
        return isinstance(self.head, DSparkConfig) and self.head.enable_confidence_head

    @property
    def num_slots(self) -> int:
        """Positions of a block that the backbone computes: the anchor's and those of masks."""
        return self.block_size - 1 if isinstance(self.head, DSparkConfig) else self.block_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How to decode. Every field is static: changing one compiles the round again.

    Raises:
      ReanchorError: a value outside its range, by `validate`, which also knows the block size.
    """

    method: Method = "reanchor"
    temperature: float = 0.0
    """0 takes the target's top token; above 0 its logits are divided by it and sampled."""
    top_k: int = 0
    """Keep the k most likely target tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of target tokens that holds this probability."""
    min_p: float = 0.0
    """Drop target tokens below this share of the top token's probability."""
    draft_rule: DraftRule = "greedy"
    draft_temperature: float | None = None
    """Temperature of draft rules `sample` and `coupled`; None takes `temperature`."""
    attach: AttachRule = "earliest"
    components: Components = "both"
    """What attached blocks may change (paper, table 4): the native block, what lies beyond it, or both."""
    retain: RetainRule = "accepted_path"
    offsets: int | None = None
    """Largest offset d that is drafted, at most B - 1; None takes B - 1."""
    nodes: int | None = None
    """Node budget N of ReAnchor's trie, at least B; None takes 4B. A * B is never exceeded. The
    deepest nodes are cut first, which are reached least often, and never the baseline's."""
    bucket_nodes: bool = True
    """Verify at the smallest of the sizes B, 2B, 4B, ..., N that holds the round's trie (with a
    schedule: 1, 2, 4, ..., N). Turn off under `vmap`, where a branch for every size would be computed."""
    schedule: Schedule = "none"
    """How many tokens of a block are verified (`schedule.py`); all but `none` need a confidence."""
    confidence_threshold: float = 0.5
    """Of schedule `threshold`: the first draft below it ends its block."""
    costs: tuple[float, ...] | None = None
    """Of schedule `hardware`: what a round costs that verifies 1, 2, .. tokens, at least B entries,
    in any unit (`profile.py` measures or estimates them). Where `bucket_nodes` is off every round
    verifies N, and cutting saves nothing."""
    logprobs: int | None = None
    """None: no log-probabilities. K: those of each committed token and of the top K."""

    def validate(self, block_size: int) -> None:
        """Checks every field against its range and the drafter's block size."""
        for name, kind in (
            ("method", Method),
            ("draft_rule", DraftRule),
            ("attach", AttachRule),
            ("components", Components),
            ("retain", RetainRule),
            ("schedule", Schedule),
        ):
            _check(getattr(self, name) in get_args(kind), name, getattr(self, name), f"one of {get_args(kind)}")
        fine = self.temperature == 0 or LEAST_TEMPERATURE <= self.temperature <= MOST_TEMPERATURE
        expected = f"a number from {LEAST_TEMPERATURE} to {MOST_TEMPERATURE}"
        _check(fine, "temperature", self.temperature, f"0 or {expected}")
        _check(self.top_k >= 0, "top_k", self.top_k, "an integer >= 0 (0 keeps all tokens)")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "a number above 0, at most 1")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "a number from 0 to 1")
        if self.draft_temperature is not None:
            _check(
                LEAST_TEMPERATURE <= self.draft_temperature <= MOST_TEMPERATURE,
                "draft_temperature",
                self.draft_temperature,
                f"{expected} (for no noise use the draft rule greedy)",
            )
        if self.logprobs is not None:
            _check(self.logprobs >= 0, "logprobs", self.logprobs, "an integer >= 0")
        fine = 0 <= self.confidence_threshold <= 1
        _check(fine, "confidence_threshold", self.confidence_threshold, "a number from 0 to 1")
        if self.costs is not None and self.method != "ar":
            costs = self.costs if isinstance(self.costs, tuple) else ()
            fine = len(costs) >= block_size and all(0 < c < float("inf") for c in costs)
            expected = f"a tuple of at least {block_size} numbers above 0, the costs of verifying 1, 2, .. tokens"
            _check(fine, "costs", self.costs, expected)
        if self.method != "reanchor":
            return
        if self.offsets is not None:
            most = block_size - 1
            _check(0 <= self.offsets <= most, "offsets", self.offsets, f"0 to {most} for block size {block_size}")
        if self.nodes is not None:
            _check(self.nodes >= block_size, "nodes", self.nodes, f"at least the block size {block_size}")

    def num_blocks(self, block_size: int) -> int:
        """A: blocks drafted in a round, the baseline block included."""
        if self.method != "reanchor":
            return 1
        return 1 + (block_size - 1 if self.offsets is None else self.offsets)

    def num_nodes(self, block_size: int) -> int:
        """N: static number of trie nodes, the anchor included."""
        if self.method != "reanchor":
            return 1 if self.method == "ar" else block_size
        # The baseline has B nodes; each shifted block adds at most its own B.
        most = self.num_blocks(block_size) * block_size
        return min(4 * block_size if self.nodes is None else self.nodes, most)

    @property
    def draft_temp(self) -> float:
        """The temperature that the draft rules `sample` and `coupled` use."""
        if self.draft_temperature is not None:
            return self.draft_temperature
        return self.temperature if self.temperature > 0 else 1.0


def longest_path(num_blocks: int, block_size: int) -> int:
    """W: anchor and drafts of the longest path. A shifted block ends at most B - 1 behind the baseline."""
    return 2 * block_size - 1 if num_blocks > 1 else block_size


def _check(fine: bool, name: str, got: object, expected: str) -> None:
    if not fine:
        raise ReanchorError(f"{name} is {got!r}; expected {expected}")
