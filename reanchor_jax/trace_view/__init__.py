"""A page that shows where every token of a trace came from, in the order of a run:

main                    `python -m reanchor_jax.trace` and its flags
read                    a trace file, line by line, into `records`: what a trace holds, checked
origin                  where each token came from, and which verifier states were retained
page                    one HTML file out of `page.html`, `page.css`, the three scripts and the data
text.js, trie.js        tokens that can be seen, whatever they hold; a round's trie
page.js                 selecting of texts and rounds
"""
