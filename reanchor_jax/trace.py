"""`python -m reanchor_jax.trace FILE --html OUT`: shows a trace as one HTML page; `--help` says more."""

import sys

from reanchor_jax.trace_view.main import main

if __name__ == "__main__":
    sys.exit(main())
