"""`python -m reanchor_jax.train`: trains a drafter for any target; `--help` lists the flags."""

import sys

from reanchor_jax.training.main import main

if __name__ == "__main__":
    sys.exit(main())
