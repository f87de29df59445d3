"""Predicts throughput, latency and dollars of a cluster by formula. Pure functions.

hardware     GPUs, their data sheets and prices
kernels      bytes and operations of a forward pass
steps        the time of a forward pass
overheads    the time that programs take between steps
round_costs  the time of a round
latency      the time that a client waits
prediction   throughput, latency and dollars of one placement of the draft
options      the placements to compare
report       the predictions as text or JSON
"""
