"""Checkpoints: Hugging Face folders, GGUF files and z-lab drafters, read and written strictly."""

from reanchor_jax.checkpoint.load import load_drafter, load_target

__all__ = ["load_drafter", "load_target"]
