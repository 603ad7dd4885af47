"""`python -m reanchor_jax.generate "PROMPT"`: generates text with the default pair; `--help` lists the rest."""

import sys

from reanchor_jax.cli.main import main
from reanchor_jax.loop import generate

if __name__ == "__main__":
    sys.exit(main())
# An import of this module would hide the library's function `reanchor_jax.generate` behind the
# module of the same name: what an import finds is the function.
sys.modules[__name__] = generate  # type: ignore[assignment]
