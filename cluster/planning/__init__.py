"""Predicts throughput, latency and dollars of a cluster by formula. Pure functions.

hardware    GPUs, their data sheets and prices
kernels     what a forward pass reads and computes
steps       what a forward pass takes
rounds      what a round takes, and the depth that pays
latency     how long a client waits
planner     one way of placing the draft, with all of this
options     the ways that are compared
published   the figures of the cluster this project was modelled on, beside what its GPUs can do
report      all of it as text or JSON
"""
