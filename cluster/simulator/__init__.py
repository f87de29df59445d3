"""A whole cluster in virtual time, with the sequences of a step in columns: what it would do under traffic.

traffic   which requests come when
columns   the state of every sequence, in arrays
chances   how many drafts come true
blocks    a target's KV blocks
planner   depths, by the controllers of `cluster.speculation`
target    a target's steps
rounds    the rounds of its sequences
draft     a draft worker's steps
worths    what draft workers are worth, found out once a plan
cluster   the router's choice, and what happens next
overheads what programs take beside the steps
figures   what came of it
hardware  steps and memory of models on GPUs
report    all of it as text or JSON

Decisions are made by the code that makes them in a cluster: controllers, costs, acceptance, calibration, probing,
shadows, the choice of a draft worker, the pace of prompts. What that code needs of a sequence is kept for those that it
looks at one by one; all else of a step is arithmetic over arrays. docs/PLANNING.md says what is left out.
"""
