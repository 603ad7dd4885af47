"""Reading of GGUF files of architecture `llama`, quantized or not, through the `gguf` package."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from reanchor_jax.checkpoint.fields import Fields
from reanchor_jax.checkpoint.fill import Index, TensorInfo
from reanchor_jax.checkpoint.gguf_file import open_gguf
from reanchor_jax.checkpoint.hf_config import (
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_MLP_WIDTH,
    MAX_VOCAB,
    MAX_WIDTH,
)
from reanchor_jax.checkpoint.rope_config import MAX_POSITIONS, MAX_THETA
from reanchor_jax.config import LayerConfig, Llama3Scaling, RopeConfig, TargetConfig
from reanchor_jax.errors import ReanchorError
from reanchor_jax.rope import rope_frequencies

_PREFIXES = ("llama.", "tokenizer.ggml.")
_FACTORS = "rope_freqs.weight"
_STOP_IDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


def is_gguf(path: Path) -> bool:
    """Whether it is a file that begins as a GGUF file does."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def dequantizable(kind: GGMLQuantizationType) -> bool:
    """Whether the `gguf` package turns this type into floats."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


class GGUFSource:
    """An open GGUF file: its config, its headers, its tensors as float32."""

    def __init__(self, path: Path):
        """Opens the file and reads its metadata.

        Raises:
          ReanchorError: a damaged file, another architecture, or metadata that is missing,
            out of range, unsupported or unknown.
        """
        self.name = str(path)
        self.files = [path]
        try:
            reader = open_gguf(path)
            self._map = reader.data.base
            self._tensors = {tensor.name: tensor for tensor in reader.tensors}
            architecture = _text(reader, "general.architecture")
            # Of the tokenizer's lists only the length counts: the vocabulary is not decoded here.
            values = {
                key: len(field.data) if key.startswith("tokenizer.") and _is_list(field) else field.contents()
                for key, field in reader.fields.items()
                if key.startswith(_PREFIXES)
            }
        except Exception as error:  # the reader trusts its input: a damaged file raises anything
            reason = " ".join(str(error).split())[:120]
            raise ReanchorError(f"{path} is not a readable GGUF file: {reason}; fetch the file again") from None
        if architecture != "llama":
            raise ReanchorError(
                f"{path} has architecture {architecture!r}; expected 'llama', the only one supported in GGUF files"
            )
        self.tensors = {
            # GGUF lists dimensions from the fastest on: [in, out] is our [out, in].
            name: TensorInfo(tuple(int(size) for size in tensor.shape[::-1]), tensor.tensor_type.name)
            for name, tensor in self._tensors.items()
        }
        self.dtypes = frozenset(
            kind.name for kind in {t.tensor_type for t in self._tensors.values()} if dequantizable(kind)
        )
        self.config = self._read_config(Fields(values, str(path)))

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """One tensor, or a part of it, dequantized to float32."""
        tensor, shape = self._tensors[name], self.tensors[name].shape
        if index is None or len(shape) < 2:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
            values = values if index is None else values[index]
        else:  # blocks lie within rows: those asked for are dequantized alone
            values = gguf.quants.dequantize(tensor.data[index[0]], tensor.tensor_type)[(slice(None), *index[1:])]
        values = np.array(values) if np.shares_memory(values, tensor.data) else values
        if isinstance(self._map, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)  # what was read of the map would stay in memory
        return values

    def _read_config(self, fields: Fields) -> TargetConfig:
        vocab_size = fields.integer("tokenizer.ggml.tokens", 1, MAX_VOCAB)
        fields.only("llama.vocab_size", vocab_size, why="it is the number of tokens")
        layer = _read_layer(fields, self._read_rope)
        context = fields.integer("llama.context_length", 1, MAX_POSITIONS)
        bos = None
        if "tokenizer.ggml.bos_token_id" in fields:
            bos = fields.integer("tokenizer.ggml.bos_token_id", 0, vocab_size - 1)
        stops = {fields.integer(name, 0, vocab_size - 1) for name in _STOP_IDS if name in fields}
        config = TargetConfig(
            model_type="llama",
            vocab_size=vocab_size,
            num_layers=fields.integer("llama.block_count", 1, MAX_LAYERS),
            pattern=(layer,),
            tie_word_embeddings="output.weight" not in self.tensors,
            max_position_embeddings=context,
            bos_token_id=bos,
            eos_token_ids=tuple(sorted(stops)),
        )
        fields.ignore(*(key for key in fields.data if key.startswith("tokenizer.")))
        fields.finish()
        return config

    def _read_rope(self, fields: Fields, head_dim: int) -> RopeConfig:
        fields.only("llama.rope.dimension_count", head_dim, why="partial rotary is not supported")
        fields.only("llama.rope.scaling.type", "none", why="other scalings are not supported")
        theta = _float32(fields.number("llama.rope.freq_base", above=1, below=MAX_THETA))
        rope = RopeConfig(theta=theta, scaling=None)
        return self._with_llama3_scaling(rope, head_dim) if _FACTORS in self.tensors else rope

    def _with_llama3_scaling(self, rope: RopeConfig, head_dim: int) -> RopeConfig:
        """Finds the `llama3` scaling behind `rope_freqs.weight`, which stores its divisors only.

        Every published Llama 3 uses the same three constants and its own factor, which is the
        largest divisor. Divisors that this does not reproduce are refused.
        """
        if self.tensors[_FACTORS] != TensorInfo((head_dim // 2,), "F32"):
            raise ReanchorError(f"{self.name}: {_FACTORS} is {self.tensors[_FACTORS]}; expected {head_dim // 2} of F32")
        divisors = self.read(_FACTORS)
        if not np.all((divisors >= 1) & (divisors < 1e6)):
            raise ReanchorError(
                f"{self.name}: {_FACTORS} holds {divisors.min():g} to {divisors.max():g}; expected 1 or more"
            )
        scaling = Llama3Scaling(
            factor=float(divisors.max()),
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        )
        scaled = RopeConfig(theta=rope.theta, scaling=scaling)
        found = rope_frequencies(rope, head_dim) / divisors
        if not np.allclose(found, rope_frequencies(scaled, head_dim), rtol=1e-5, atol=0):
            raise ReanchorError(
                f"{self.name}: {_FACTORS} is not the llama3 scaling with low 1, high 4 and 8192 positions; "
                "expected that scaling: use the safetensors checkpoint"
            )
        return scaled


def _read_layer(fields: Fields, read_rope: Callable[[Fields, int], RopeConfig]) -> LayerConfig:
    """Sizes of a decoder layer; `read_rope` needs its head dim."""
    width = fields.integer("llama.embedding_length", 1, MAX_WIDTH)
    num_heads = fields.integer("llama.attention.head_count", 1, MAX_WIDTH)
    num_kv_heads = fields.integer("llama.attention.head_count_kv", 1, MAX_WIDTH)
    if num_heads % num_kv_heads:
        raise fields.fail("llama.attention.head_count_kv", num_kv_heads, f"a divisor of {num_heads} heads")
    if "llama.attention.key_length" in fields:
        head_dim = fields.integer("llama.attention.key_length", 2, MAX_HEAD_DIM)
    else:
        if width % num_heads:
            raise fields.fail("llama.embedding_length", width, f"a multiple of {num_heads} heads")
        head_dim = width // num_heads
    if head_dim % 2:
        raise fields.fail("llama.attention.key_length", head_dim, "an even number")
    fields.only("llama.attention.value_length", head_dim, why="values are as wide as keys")
    fields.only("llama.expert_count", 0, why="mixtures of experts are not supported")
    fields.only("llama.expert_used_count", 0, why="mixtures of experts are not supported")
    return LayerConfig(
        hidden_size=width,
        intermediate_size=fields.integer("llama.feed_forward_length", 1, MAX_MLP_WIDTH),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_float32(fields.number("llama.attention.layer_norm_rms_epsilon", above=0, below=1)),
        rope=read_rope(fields, head_dim),
        qk_norm=False,
    )


def _float32(value: float) -> float:
    """The shortest decimal of a float32: 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))


def _is_list(field: gguf.ReaderField) -> bool:
    return field.types[0] == gguf.GGUFValueType.ARRAY


def _text(reader: gguf.GGUFReader, key: str) -> str:
    field = reader.get_field(key)
    return "" if field is None else str(field.contents())
