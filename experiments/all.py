"""All experiments in one run, prompt by prompt, each setting decoded once.

python -m experiments.all --pair PAIR --prompts DIR --out OUT
"""

from __future__ import annotations

import sys

from experiments import (
    ablation,
    acceptance_length,
    agreement,
    alignment,
    attachment_rules,
    components,
    context_length,
    draft_rules,
    drafter_variants,
    earliest_win_rate,
    main_results,
    node_budget,
    offset_budget,
    retention_rules,
)
from experiments.study import command

EXPERIMENTS = [
    module.EXPERIMENT
    for module in (
        agreement,
        acceptance_length,
        main_results,
        drafter_variants,
        components,
        alignment,
        attachment_rules,
        ablation,
        earliest_win_rate,
        retention_rules,
        draft_rules,
        offset_budget,
        node_budget,
        context_length,
    )
]
"""In the paper's order, then those beyond it."""

if __name__ == "__main__":
    sys.exit(command.run(EXPERIMENTS, "all", __doc__))
