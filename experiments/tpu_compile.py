"""Compiles one round ahead of time for a TPU that need not be there, at the size of Qwen3-4B or Gemma 4 12B.

    pip install libtpu && python -m experiments.tpu_compile [--model gemma-4-12b] [--chips 4] [--slots 4096]

No weights are read or made: shapes alone are compiled. Prints the memory that the compiler plans.
Fails where a donated cache is not updated in place.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
import time

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # do not look for the metadata server of a TPU machine
os.environ.setdefault("TPU_LOG_DIR", "disabled")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from reanchor_jax import (
    DecodeConfig,
    Drafter,
    DrafterConfig,
    Pair,
    ReanchorError,
    Target,
    TargetConfig,
    decode_round,
    prefill,
    shard_pair,
)
from reanchor_jax.cli.process import run
from reanchor_jax.config import DSparkConfig, LayerConfig, LMHeadConfig, ProportionalScaling, RopeConfig

QWEN3_4B_LAYER = LayerConfig(
    hidden_size=2560,
    intermediate_size=9728,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e6, scaling=None),
    qk_norm=True,
)
QWEN3_4B = TargetConfig(
    model_type="qwen3",
    vocab_size=151936,
    num_layers=36,
    pattern=(QWEN3_4B_LAYER,),
    tie_word_embeddings=True,
    max_position_embeddings=40960,
    bos_token_id=None,
    eos_token_ids=(151645,),
)
QWEN3_DFLASH = DrafterConfig(
    block_size=16,
    mask_token_id=151669,
    target_layer_ids=(1, 9, 17, 25, 33),
    target_num_layers=36,
    vocab_size=QWEN3_4B.vocab_size,
    num_layers=5,
    layer=QWEN3_4B_LAYER,
    head=LMHeadConfig(),
)
GEMMA_SLIDING = LayerConfig(
    hidden_size=3840,
    intermediate_size=15360,
    num_heads=16,
    num_kv_heads=8,
    head_dim=256,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e4, scaling=None),
    qk_norm=True,
    sliding_window=1024,
    activation="gelu_tanh",
    attention_scale=1.0,
    v_norm=True,
    sandwich_norms=True,
    layer_scalar=True,
    float32_norms=True,
)
GEMMA_FULL = dataclasses.replace(
    GEMMA_SLIDING,
    num_kv_heads=1,
    head_dim=512,
    rope=RopeConfig(theta=1e6, scaling=ProportionalScaling(partial_rotary_factor=0.25, factor=1.0)),
    sliding_window=None,
    shared_kv=True,
)
GEMMA_12B = TargetConfig(
    model_type="gemma4_unified",
    vocab_size=262144,
    num_layers=48,
    pattern=(GEMMA_SLIDING,) * 5 + (GEMMA_FULL,),
    tie_word_embeddings=True,
    max_position_embeddings=262144,
    bos_token_id=2,
    eos_token_ids=(1,),
    scaled_embedding=True,
    logit_softcap=30.0,
)
GEMMA_DSPARK = DrafterConfig(
    block_size=8,
    mask_token_id=4,
    target_layer_ids=(5, 17, 29, 41, 46),
    target_num_layers=48,
    vocab_size=GEMMA_12B.vocab_size,
    num_layers=5,
    layer=GEMMA_FULL,
    head=DSparkConfig(
        markov_rank=256,
        markov_head_type="vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        scaled_embedding=True,
        logit_softcap=30.0,
    ),
)
MODELS = {"qwen3-4b": (QWEN3_4B, QWEN3_DFLASH), "gemma-4-12b": (GEMMA_12B, GEMMA_DSPARK)}
"""Published sizes, targets and drafters: Qwen3-4B with DFlash, Gemma 4 12B with DSpark."""


def abstract_pair(target: TargetConfig, drafter: DrafterConfig) -> Pair:
    """A bfloat16 pair of shapes without arrays."""
    dtype = jnp.dtype(jnp.bfloat16)
    return jax.eval_shape(
        lambda: Pair(
            Target(target, dtype=dtype, rngs=nnx.Rngs(0)),
            Drafter(drafter, dtype=dtype, rngs=nnx.Rngs(0)),
        )
    )


def main() -> int:
    """Exit code 0: compiled; 1: a cache is copied; 2: bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3-4b")
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--chips", type=int, default=1, help="of the topology, to shard the weights over")
    parser.add_argument("--slots", type=int, default=4096, help="prompt tokens, padded")
    parser.add_argument("--nodes", type=int, default=64)
    options = parser.parse_args()
    config = DecodeConfig(nodes=options.nodes, attach="fallback")
    pair = abstract_pair(*MODELS[options.model])
    begin = functools.partial(prefill, config=config, max_new_tokens=256)
    key = jax.eval_shape(lambda: jax.random.key(0))
    prompt = jax.ShapeDtypeStruct((options.slots,), jnp.int32)
    state = jax.eval_shape(begin, pair, prompt, jax.ShapeDtypeStruct((), jnp.int32), key=key)

    chips = topologies.get_topology_desc(options.topology, "tpu").devices
    if not 1 <= options.chips <= len(chips):
        raise ReanchorError(f"--chips is {options.chips}; expected 1 to {len(chips)}, those of {options.topology}")
    devices = np.array(chips[: options.chips])
    mesh = Mesh(devices, ("model",))

    def lay(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Caches [L, K, S, H] lie by heads where there are enough, all else is everywhere."""
        is_split = x.ndim == 4 and x.shape[1] % len(devices) == 0
        spec = PartitionSpec(None, "model") if is_split else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    state = jax.tree.map(lay, state)
    step = jax.jit(functools.partial(decode_round, config=config), donate_argnums=1)
    start = time.monotonic()
    lowered = step.trace(shard_pair(pair, mesh), state).lower(lowering_platforms=("tpu",))
    traced = time.monotonic()
    compiled = lowered.compile()
    done = time.monotonic()
    memory = compiled.memory_analysis()
    assert memory is not None
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree) if x.dtype != key.dtype)
    mib = lambda num: f"{num / 2**20:10.1f} MiB"
    print(
        f"{options.model}, {devices[0].device_kind}, chips: {len(devices)}; {config.nodes} nodes, {options.slots} slots"
    )
    print(f"trace {traced - start:.1f} s, compile {done - traced:.1f} s")
    print(f"weights      {mib(size(pair))} in all")
    caches = size((state.cache, state.context))
    print(f"caches       {mib(caches)} in all")
    print("of one chip:")
    print(f"arguments    {mib(memory.argument_size_in_bytes)}")
    print(f"aliased      {mib(memory.alias_size_in_bytes)}")
    print(f"temporaries  {mib(memory.temp_size_in_bytes)}")
    print(f"program      {mib(memory.generated_code_size_in_bytes)}")
    of_one = sum(
        size(x) // (len(devices) if x.sharding.spec else 1) for x in jax.tree.leaves((state.cache, state.context))
    )
    return 0 if memory.alias_size_in_bytes >= of_one else 1


if __name__ == "__main__":
    sys.exit(run(main))
