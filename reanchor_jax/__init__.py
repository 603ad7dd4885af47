"""ReAnchor speculative decoding: rejected verifier states reused as shifted anchors.

    pair = load_pair("smollm2-135m")
    run = jax.jit(functools.partial(generate, config=DecodeConfig(), max_new_tokens=64))
    result = run(pair, prompt_ids, prompt_len, key=jax.random.key(0))

`prefill`, `decode_round` and `generate` are pure functions: compose them under your own
`jax.jit`, `vmap` and `while_loop`.
"""

from reanchor_jax.config import DecodeConfig as DecodeConfig
from reanchor_jax.config import DrafterConfig as DrafterConfig
from reanchor_jax.config import TargetConfig as TargetConfig
from reanchor_jax.decode import decode_round as decode_round
from reanchor_jax.drafter import Drafter as Drafter
from reanchor_jax.errors import ReanchorError as ReanchorError
from reanchor_jax.loop import Generation as Generation
from reanchor_jax.loop import generate as generate
from reanchor_jax.pair import Pair as Pair
from reanchor_jax.pair import check_pair as check_pair
from reanchor_jax.pair import load_pair as load_pair
from reanchor_jax.prefill import num_slots as num_slots
from reanchor_jax.prefill import prefill as prefill
from reanchor_jax.sharding import shard_pair as shard_pair
from reanchor_jax.state import DecodeState as DecodeState
from reanchor_jax.state import RoundRecord as RoundRecord
from reanchor_jax.target import Target as Target
from reanchor_jax.tokenizer import load_tokenizer as load_tokenizer

__version__ = "0.1.0"
