"""The command line `python -m reanchor_jax.generate`, in the order of a run:

arguments      flags to `Options`; `flags` has what the training command shares
prompts        PROMPT or a JSONL file to `Prompt`s
models         checkpoints and tokenizer, held against the request before weights are read
session        prompts to answers, turn by turn
decoder        one turn, by `programs` (compiled), into `answer` and its `text`
check          comparison with plain decoding
trace          what happened in every round
output         results as JSON, resuming
report         statistics for people
compile_cache  compiled programs on disk
process        errors, exit codes, Ctrl-C, closed streams; shared too
main           all of it
"""
