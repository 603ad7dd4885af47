"""Training of drafters, and of tiny targets for tests and demonstrations.

main, arguments `python -m reanchor_jax.train` and its flags
data, answers   prompts, the target's own answers, batches as a function of the step
self_prompts    more prompts, which the target writes
features        the target's features and top tokens of a text, on disk; their scale
blocks          random anchors, the masked blocks behind them, the tokens they should draft
loss            position-decayed cross entropy of labels hard or distilled, and that of a confidence
trainable       which parameters are trained: all, or the head alone; and in which dtype they compute
optimizer       AdamW with warm-up and cosine decay; gradients of several steps
mesh            texts along one axis of a device mesh, weights and moments along the other
run             the loop: step, log, evaluate, checkpoint, resume
log             log.jsonl, and what is made from it: a table, `plot`, `tensorboard`; `progress` on stderr
trainer         its steps on the target's own texts
draft_opd       its steps on the drafter's own drafts: `rollout` records them, `replay` scores them
checkpoints     exact resume with Orbax
start           the first parameters of a new drafter
evaluate        held-out accuracy per block position, and tau
calibrate       temperatures of a confidence, by what happens on held-out texts
step            the compiled programs of the loop
recipe_file     flags from a TOML file; `recipes/` has some
cost, flops     what a recipe's run costs
tiny_pair       the recipe: `tiny_text`, then `target_training`, then a drafter
"""
