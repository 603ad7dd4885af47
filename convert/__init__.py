"""Checkpoint tools that run from the source tree and are not installed."""
