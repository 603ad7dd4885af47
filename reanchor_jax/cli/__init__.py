"""The command line `python -m reanchor_jax.generate`.

arguments   flags to `Options`             session   pair, tokenizer, conversations
prompts     PROMPT or JSONL to `Prompt`    decoder   compiled programs, one turn's `Answer`
text        stop strings in a stream       check     comparison with plain decoding
output      result file, resume            trace     what happened in every round
report      statistics for people          main      all of it in order, exit codes
"""
