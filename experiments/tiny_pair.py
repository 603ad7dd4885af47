"""`python -m experiments.tiny_pair --out DIR`: the recipe `tiny-pair` of `reanchor_jax.train`."""

import sys

from reanchor_jax.training.main import main

if __name__ == "__main__":
    sys.exit(main(["--recipe", "tiny-pair", *sys.argv[1:]]))
