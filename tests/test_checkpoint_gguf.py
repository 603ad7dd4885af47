"""GGUF files written here, against the same weights in a safetensors folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from reanchor_jax.checkpoint import load_drafter, load_target
from reanchor_jax.checkpoint.fill import named_parameters
from reanchor_jax.checkpoint.gguf_source import dequantizable
from reanchor_jax.checkpoint.rules import pairs_to_halves
from reanchor_jax.target import forward_text
from tests.checkpoint_folders import LLAMA3, refuses, target_config, target_tensors, write_folder

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """model.layers.2.mlp.up_proj.weight -> blk.2.ffn_up.weight"""
    name = name.removesuffix(".weight")
    if name in NAMES:
        return NAMES[name] + ".weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The row order that the llama.cpp converter writes, spelled out row by row: rows i and
    i + H/2 of a head become neighbours."""
    half = len(weight) // num_heads // 2
    rows = [head * 2 * half + part * half + i for head in range(num_heads) for i in range(half) for part in range(2)]
    return weight[rows]


def metadata(config: dict[str, Any]) -> dict[str, Any]:
    """Metadata as the llama.cpp converter writes it."""
    return {
        "general.architecture": "llama",
        "general.name": "test",
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_theta"],
        "llama.rope.dimension_count": config["head_dim"],
        "llama.vocab_size": config["vocab_size"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"t{n}" for n in range(config["vocab_size"])],
        "tokenizer.ggml.token_type": [1] * config["vocab_size"],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.add_bos_token": False,
    }


def write_gguf(path: Path, values: dict[str, Any], tensors: dict[str, tuple[np.ndarray, Kind]]) -> Path:
    """Writes a file; a tensor is its bytes or floats, and their type."""
    writer = gguf.GGUFWriter(path, values.get("general.architecture", "llama"))
    for key, value in values.items():
        if key == "general.architecture" or value is ...:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, (tensor, kind) in tensors.items():
        writer.add_tensor(name, tensor, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantized(config: dict[str, Any], tensors: dict[str, np.ndarray], kind: Kind) -> dict[str, tuple[np.ndarray, Kind]]:
    """The tensors of a file: matrices permuted and quantized, norms float32, as converters do."""
    out = {}
    for name, tensor in tensors.items():
        if name.endswith("q_proj.weight"):
            tensor = permuted(tensor, config["num_attention_heads"])
        if name.endswith("k_proj.weight"):
            tensor = permuted(tensor, config["num_key_value_heads"])
        used = kind if tensor.ndim == 2 else Kind.F32
        out[gguf_name(name)] = (gguf.quants.quantize(tensor, used), used)
    return out


def make(
    tmp_path: Path, kind: Kind = Kind.F32, config: dict | None = None, extra: dict | None = None, **changes
) -> Path:
    """A GGUF file of the small model with changed metadata or more tensors."""
    config = config or target_config()
    tensors = quantized(config, target_tensors(config), kind) | (extra or {})
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not ...}
    values = metadata(config) | {name.replace("__", "."): value for name, value in changes.items()}
    return write_gguf(tmp_path / "model.gguf", values, tensors)


@jax.jit
def output(target) -> jax.Array:
    return forward_text(target, jnp.arange(40, dtype=jnp.int32) * 7 % 150).hidden


# ---------------------------------------------------------------- values


def test_row_order_example_of_the_docstring():
    file = np.array([[0], [3], [1], [4], [2], [5]])
    np.testing.assert_array_equal(pairs_to_halves(file, 1)[:, 0], np.arange(6))
    two = np.concatenate([file, file + 6])
    np.testing.assert_array_equal(pairs_to_halves(two, 2)[:, 0], np.arange(12))
    weight = np.arange(48.0).reshape(24, 2)
    np.testing.assert_array_equal(pairs_to_halves(permuted(weight, 3), 3), weight)


FLOAT_KINDS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


@pytest.mark.parametrize("kind", FLOAT_KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_gguf_equals_safetensors(tmp_path, kind, tied):
    """Every parameter, bit by bit, also where the type rounds: both hold the rounded weights."""
    config = target_config(tie_word_embeddings=tied)
    tensors = target_tensors(config)
    path = make(tmp_path, Kind[kind], config)
    rounded = {
        name: gguf.quants.dequantize(gguf.quants.quantize(t, Kind[kind]), Kind[kind]) if t.ndim == 2 else t
        for name, t in tensors.items()
    }
    got, want = load_target(path), load_target(write_folder(tmp_path / "folder", config, rounded))
    assert got.config == want.config
    assert (got.lm_head is None) == tied
    for name, leaf in named_parameters(want).items():
        np.testing.assert_array_equal(named_parameters(got)[name], leaf, err_msg=name)


K_KINDS = [
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "TQ1_0",
    "TQ2_0",
    "IQ4_XS",
    "IQ4_NL",
    "IQ2_XXS",
    "IQ3_S",
    "IQ1_M",
    "MXFP4",
]


@pytest.mark.parametrize("kind", K_KINDS)
def test_types_that_only_dequantize(tmp_path, kind):
    """Blocks of 256, made of random bytes (small ones: finite scales)."""
    config = target_config(hidden_size=256, intermediate_size=256, head_dim=64, num_hidden_layers=1)
    rng, tensors, plain = np.random.default_rng(0), {}, {}
    for name, tensor in target_tensors(config).items():
        if tensor.ndim == 1:
            tensors[gguf_name(name)], plain[name] = (tensor, Kind.F32), tensor
            continue
        shape = gguf.quants.quant_shape_to_byte_shape(tensor.shape, Kind[kind])
        blocks = rng.integers(0, 58, shape, dtype=np.uint8)
        floats = gguf.quants.dequantize(blocks, Kind[kind])
        assert np.isfinite(floats).all() and floats.std() > 0
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        tensors[gguf_name(name)] = (blocks if heads is None else permuted(blocks, heads), Kind[kind])
        plain[name] = floats
    got = load_target(write_gguf(tmp_path / "k.gguf", metadata(config), tensors))
    want = load_target(write_folder(tmp_path / "folder", config, plain))
    for name, leaf in named_parameters(want).items():
        np.testing.assert_array_equal(named_parameters(got)[name], leaf, err_msg=name)


def test_types_that_cannot_be_read(tmp_path):
    """Refused by name before any tensor is read, and every other type is readable."""
    extra = {"blk.1.ffn_up.weight": (np.zeros((96, 64), np.int8), Kind.I8)}
    refuses(lambda: load_target(make(tmp_path, extra=extra)), "unsupported dtypes: blk.1.ffn_up.weight is I8")


def test_a_head_by_its_name_in_folders_is_refused(tmp_path):
    extra = {"lm_head.weight": (np.zeros((2, 2), np.float32), Kind.F32)}
    refuses(lambda: load_target(make(tmp_path, extra=extra)), "the model has no place for: lm_head.weight")
    unreadable = {kind.name for kind in Kind if not dequantizable(kind)}
    assert {"I8", "I32", "F64", "Q8_K"} <= unreadable
    assert unreadable.isdisjoint([*FLOAT_KINDS, *K_KINDS])


def test_dtype_is_the_one_asked_for(tmp_path):
    target = load_target(make(tmp_path, Kind.Q8_0), dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(target)} == {jnp.dtype(jnp.bfloat16)}


# ---------------------------------------------------------------- metadata


def test_config_of_a_file(tmp_path):
    config = load_target(make(tmp_path, llama__rope__freq_base=500000.0)).config
    assert (config.layer.rope.theta, config.layer.rope.scaling) == (500000.0, None)
    assert config.layer.rms_norm_eps == 1e-5  # the float32 in the file is 9.999999747378752e-06
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    values = {"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 2}
    more = load_target(make(tmp_path, **values, **{"tokenizer.ggml.bos_token_id": ...})).config
    assert (more.bos_token_id, more.eos_token_ids) == (None, (2, 9))
    none = load_target(make(tmp_path, **{"tokenizer.ggml.eos_token_id": ...})).config
    assert none.eos_token_ids == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"llama.rope.freq_base": 20000.0},
        {"llama.attention.layer_norm_rms_epsilon": 1e-2},
        {
            "llama.attention.head_count": 2,
            "llama.attention.head_count_kv": 1,
            "llama.attention.key_length": 32,
            "llama.rope.dimension_count": 32,
        },
    ],
)
def test_each_field_changes_the_output(tmp_path, changes):
    before, after = load_target(make(tmp_path)), load_target(make(tmp_path, **changes))
    assert float(jnp.abs(output(before) - output(after)).max()) > 1e-3


def llama3_divisors(theta: float, head_dim: int, factor: float, context: int = 8192) -> np.ndarray:
    """What a converter stores as rope_freqs.weight, by its definition over wavelengths."""
    out = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < context / 4:
            out.append(1.0)
        elif wavelength > context:
            out.append(factor)
        else:
            share = (context / wavelength - 1) / 3
            out.append(1 / ((1 - share) / factor + share))
    return np.array(out, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_behind_rope_freqs(tmp_path, factor):
    """The divisors of Llama 3.1 and 3.2 become the scaling that the folder's config names."""
    config = target_config(
        rope_theta=500000.0,
        rope_scaling=LLAMA3 | {"factor": factor, "original_max_position_embeddings": 8192},
    )
    extra = {"rope_freqs.weight": (llama3_divisors(500000.0, 16, factor), Kind.F32)}
    got = load_target(make(tmp_path, config=config, extra=extra))
    want = load_target(write_folder(tmp_path / "folder", config, target_tensors(config)))
    assert got.config == want.config and got.config.layer.rope.scaling is not None
    np.testing.assert_array_equal(output(got), output(want))


@pytest.mark.parametrize(
    "divisors",
    [
        llama3_divisors(10000.0, 16, 8.0, context=4096),
        np.full(8, 8.0, np.float32),
        np.full(8, np.nan, np.float32),
        np.zeros(8, np.float32),
        np.ones(7, np.float32),
    ],
)
def test_other_rope_freqs_are_refused(tmp_path, divisors):
    extra = {"rope_freqs.weight": (divisors, Kind.F32)}
    refuses(lambda: load_target(make(tmp_path, extra=extra)), "rope_freqs.weight", "expected")


BAD = {
    "llama.block_count": [0, 1 << 31, "3", 3.0, ...],
    "llama.context_length": [0, ...],
    "llama.embedding_length": [0, 66, ...],
    "llama.feed_forward_length": [0, [96, 96], ...],
    "llama.attention.head_count": [0, 3, [4, 4, 4], ...],
    "llama.attention.head_count_kv": [0, 3, ...],
    "llama.attention.key_length": [15, 0],
    "llama.attention.value_length": [32],
    "llama.attention.layer_norm_rms_epsilon": [0.0, float("nan"), 2.0, ...],
    "llama.rope.freq_base": [0.0, float("inf"), "10000", ...],
    "llama.rope.dimension_count": [8],
    "llama.rope.scaling.type": ["linear", "yarn"],
    "llama.rope.scaling.factor": [2.0],
    "llama.expert_count": [8],
    "llama.vocab_size": [161],
    "llama.attention.sliding_window": [128],
    "llama.new_trick": [1],
    "tokenizer.ggml.tokens": [["a", "b"], ...],
    "tokenizer.ggml.eos_token_id": [160, "2"],
    "tokenizer.ggml.bos_token_id": [160],
    "general.architecture": ["qwen3", "gemma"],
}
NAMED_OTHERWISE = {
    "tokenizer.ggml.tokens": "",
    "llama.attention.key_length": "",
    "llama.embedding_length": "embedding_length",
    "general.architecture": "expected 'llama'",
    "llama.attention.head_count": "",
}


def test_every_bad_value_is_refused_by_name(tmp_path):
    load_target(make(tmp_path))
    for name, values in BAD.items():
        for bad in values:
            path = make(tmp_path, **{name: bad})
            refuses(lambda path=path: load_target(path), str(path), NAMED_OTHERWISE.get(name, name))


# ---------------------------------------------------------------- names, shapes, damage


def test_strict_both_ways(tmp_path):
    extra = {
        "blk.1.ffn_up.weight": ...,
        "blk.0.attn_q.bias": (np.zeros(64, np.float32), Kind.F32),
        "output_norm.weight": (np.zeros(63, np.float32), Kind.F32),
    }
    line = refuses(lambda: load_target(make(tmp_path, extra=extra)))
    assert "missing tensors: blk.1.ffn_up.weight;" in line
    assert "no place for: blk.0.attn_q.bias;" in line
    assert "output_norm.weight is 63, expected 64;" in line


def test_files_that_are_no_gguf(tmp_path):
    path = tmp_path / "model.gguf"
    for content in (b"", b"GGU", b"hello, world", b"FUGG" * 50):
        path.write_bytes(content)
        refuses(lambda: load_target(path), "no GGUF file")
    refuses(lambda: load_target(tmp_path / "absent.gguf"), "does not exist")
    refuses(lambda: load_drafter(make(tmp_path)), "expected a drafter's folder")


def test_truncated_files_are_refused(tmp_path):
    path = make(tmp_path, Kind.Q4_1)
    whole = path.read_bytes()
    for size in [*range(4, 64, 5), *np.linspace(64, len(whole) - 1, 25).astype(int)]:
        path.write_bytes(whole[:size])
        refuses(lambda: load_target(path), "fetch the file again")


def test_damaged_headers_neither_hang_nor_leak(tmp_path):
    """Random bytes in the header: it loads (the byte did not matter) or it is one error line, soon.
    Among them lengths of 2**60, over which the `gguf` package alone would loop for ever."""
    path = make(tmp_path, Kind.Q4_1)
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    header = whole.index(b"output_norm.weight")
    started, refused = time.monotonic(), 0
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[rng.integers(4, header)] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            load_target(path)
        except Exception:
            refuses(lambda: load_target(path))
            refused += 1
    length = whole.index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type") + 8
    damaged = bytearray(whole)
    damaged[length : length + 8] = (1 << 60).to_bytes(8, "little")
    path.write_bytes(damaged)
    refuses(lambda: load_target(path), "ends too early")
    assert refused > 5
    assert time.monotonic() - started < 60
