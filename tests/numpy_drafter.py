"""A drafter's backbone in plain NumPy float64, from the files on disk; shares no code with the package."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


def sees(query: int, key: int, window: int, attention: str) -> bool:
    """Whether a sliding layer's query position sees a key position."""
    if attention == "causal":
        return query - window < key <= query
    if attention == "symmetric":
        return -window < key - query < window
    return True


class NumpyDrafter:
    """DFlash's forward for one block behind a context, and nothing cached."""

    def __init__(self, folder: Path):
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = {
            name: array.astype(np.float64) for name, array in load_file(folder / "model.safetensors").items()
        }

    def features(self, x: np.ndarray, start: int, context: np.ndarray, attention: str) -> np.ndarray:
        """Features [T, D] of block embeddings x [T, D] at start, start + 1, ... behind features of 0 .. start - 1."""
        c, w = self.config, self.tensors
        context = self._norm(context.astype(np.float64) @ w["fc.weight"].T, "hidden_norm.weight")
        assert len(context) == start
        x = x.astype(np.float64)
        query_pos = list(range(start, start + len(x)))
        kinds = c.get("layer_types") or ["full_attention"] * c["num_hidden_layers"]
        for layer, kind in enumerate(kinds):
            at = f"layers.{layer}."
            mask = np.array(
                [
                    [
                        kind == "full_attention" or sees(q, k, c["sliding_window"], attention)
                        for k in range(query_pos[-1] + 1)
                    ]
                    for q in query_pos
                ]
            )
            normed = self._norm(x, at + "input_layernorm.weight")
            x = x + self._attention(at + "self_attn.", normed, np.concatenate([context, normed]), query_pos, mask)
            normed = self._norm(x, at + "post_attention_layernorm.weight")
            gate, up = normed @ w[at + "mlp.gate_proj.weight"].T, normed @ w[at + "mlp.up_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[at + "mlp.down_proj.weight"].T
        return self._norm(x, "norm.weight")

    def _attention(
        self, at: str, x: np.ndarray, keys: np.ndarray, query_pos: list[int], mask: np.ndarray
    ) -> np.ndarray:
        c, size = self.config, self.config["head_dim"]
        q = self._heads(at + "q", x, c["num_attention_heads"])
        k = self._heads(at + "k", keys, c["num_key_value_heads"])
        v = self._heads(at + "v", keys, c["num_key_value_heads"])
        q = self._rotate(self._norm(q, at + "q_norm.weight"), query_pos)
        k = self._rotate(self._norm(k, at + "k_norm.weight"), list(range(len(keys))))
        group = c["num_attention_heads"] // c["num_key_value_heads"]
        out = []
        for head in range(c["num_attention_heads"]):
            scores = q[:, head] @ k[:, head // group].T / np.sqrt(size)
            scores = np.where(mask, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out.append(weights / weights.sum(axis=1, keepdims=True) @ v[:, head // group])
        return self._linear(at + "o", np.concatenate(out, axis=1))

    def _heads(self, name: str, x: np.ndarray, num_heads: int) -> np.ndarray:
        return self._linear(name, x).reshape(len(x), num_heads, -1)

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.tensors[name + "_proj.weight"].T + self.tensors.get(name + "_proj.bias", 0.0)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.config["rms_norm_eps"])
        return x / scale * self.tensors[name]

    def _rotate(self, x: np.ndarray, positions: list[int]) -> np.ndarray:
        half = x.shape[-1] // 2
        angles = np.outer(positions, self.config["rope_theta"] ** (-np.arange(half) / half))[:, None]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate(
            [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=-1
        )
