"""Training of DFlash drafters, and of tiny targets for tests and demonstrations.

data, answers   prompts, the target's own answers, batches as a function of the step
blocks          random anchors, the masked blocks behind them, the tokens they should draft
loss            position-decayed cross entropy under the target's LM head
optimizer       AdamW with warm-up and cosine decay
trainer         the loop: step, log, evaluate, checkpoint, resume
checkpoints     exact resume with Orbax
start           the first parameters of a new drafter
evaluate        held-out accuracy per block position, and tau
"""
