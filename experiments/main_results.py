"""Table 2: tau and speedup of the chain and of ReAnchor at temperatures 0 and 1.

python -m experiments.main_results --pair PAIR --prompts DIR
"""

from __future__ import annotations

import sys

from experiments.study import command
from experiments.study.comparison import compare, paper_target, parse_numbers
from experiments.study.experiment import Experiment, Part, tau_bars
from experiments.study.results import Results
from experiments.study.settings import Setting, Study, chain, reanchor

PAPER = parse_numbers("""
0 Qwen3-4B DFlash 6.24/4.19 7.37/5.10 6.36/4.35 6.51/4.39 5.81/4.13 5.87/4.19 3.46/2.44 2.89/2.01
0 Qwen3-4B DFlash+ReAnchor 7.51/5.03 8.45/5.78 7.20/4.90 7.50/5.00 6.78/4.78 6.84/4.76 3.89/2.68 3.17/2.17
0 Qwen3-8B DFlash 6.34/4.39 7.28/5.05 6.38/4.41 6.49/4.43 5.71/4.06 5.94/4.10 3.42/2.40 2.87/1.99
0 Qwen3-8B DFlash+ReAnchor 7.45/5.03 8.31/5.67 7.11/4.72 7.52/5.05 6.68/4.69 7.24/4.83 3.82/2.57 3.16/2.14
0 Gemma-4-12B DFlash 3.88/3.27 4.97/4.14 4.56/3.80 4.48/3.70 4.12/3.37 4.07/3.27 2.96/2.37 2.77/2.16
0 Gemma-4-12B DFlash+ReAnchor 4.79/3.99 6.04/4.94 5.30/4.39 5.75/4.69 5.04/4.05 4.74/3.69 3.36/2.65 3.13/2.48
0 Llama-3.1-8B DFlash 4.42/2.71 3.85/2.43 3.82/2.43 5.03/3.26 5.02/3.13 4.02/2.51 3.85/2.42 3.70/2.32
0 Llama-3.1-8B DFlash+ReAnchor 4.98/3.11 4.25/2.65 4.25/2.63 5.60/3.58 5.65/3.52 4.44/2.69 4.28/2.62 4.17/2.59
1 Qwen3-4B DFlash 4.90/3.54 4.81/3.32 3.70/2.62 5.00/3.60 4.56/3.26 4.68/3.34 2.66/1.86 2.30/1.63
1 Qwen3-4B DFlash+ReAnchor 5.64/3.80 5.53/3.73 4.24/2.83 5.69/3.90 5.16/3.49 4.93/3.18 2.86/1.94 2.46/1.67
1 Qwen3-8B DFlash 4.62/3.36 4.68/3.32 3.57/2.53 4.42/3.20 4.03/2.93 4.72/3.37 2.43/1.75 2.23/1.58
1 Qwen3-8B DFlash+ReAnchor 5.35/3.79 5.11/3.46 3.94/2.71 4.88/3.34 4.52/3.20 5.42/3.73 2.63/1.77 2.38/1.63
1 Gemma-4-12B DFlash 4.39/3.76 4.88/4.12 4.17/3.45 4.19/3.46 3.79/3.12 3.62/3.00 2.86/2.22 2.59/1.81
1 Gemma-4-12B DFlash+ReAnchor 5.45/4.48 5.84/4.71 4.92/3.92 5.24/4.18 4.70/3.72 4.22/3.24 3.22/2.38 2.94/2.04
1 Llama-3.1-8B DFlash 2.92/1.80 2.31/1.52 1.93/1.32 3.58/2.19 3.53/2.31 2.68/1.68 2.38/1.47 2.43/1.49
1 Llama-3.1-8B DFlash+ReAnchor 2.97/1.76 2.40/1.49 1.93/1.18 3.87/2.34 3.86/2.49 2.95/1.73 2.48/1.46 2.63/1.57
""")


def settings(study: Study) -> list[Setting]:
    return [setting for T in (0.0, 1.0) for setting in (chain(T), reanchor(study, T))]


def parts(results: Results) -> list[Part]:
    cold, cold_new, warm, warm_new = settings(results.study)
    rows = [(0.0, "DFlash", cold, cold_new), (1.0, "DFlash", warm, warm_new)]
    table = compare(results, rows, PAPER, paper_target(results.study.pair))
    labels = ["chain, T = 0", "ReAnchor, T = 0", "chain, T = 1", "ReAnchor, T = 1"]
    named = [(label, setting, "") for label, setting in zip(labels, settings(results.study), strict=True)]
    return [table, tau_bars(results, "main_results", named, "Committed tokens per round, chain and ReAnchor.")]


EXPERIMENT = Experiment(
    "main_results",
    "Chain and ReAnchor",
    "Table 2 of the paper. Over its four targets and eight benchmarks: +15.2% in tau and +13.4% in speed at T = 0, "
    "+11.8% and +6.9% at T = 1.",
    settings,
    parts,
)

if __name__ == "__main__":
    sys.exit(command.run([EXPERIMENT], EXPERIMENT.name, __doc__))
