"""Checkpoints: Hugging Face folders, GGUF files and z-lab drafters, read and written strictly."""

from reanchor_jax.checkpoint.load import load_drafter, load_target
from reanchor_jax.checkpoint.save import save_drafter, save_target

__all__ = ["load_drafter", "load_target", "save_drafter", "save_target"]
