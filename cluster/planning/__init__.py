"""Predicts throughput, latency and dollars of a cluster by formula. Pure functions.

hardware     GPUs, their data sheets and prices
kernels      bytes and operations of a forward pass
steps        the time of a forward pass
round_costs  the time of a round, and the depth that pays
latency      how long a client waits
prediction   throughput, latency and dollars of one way to place the draft
options      the ways that are compared
published    the figures of the cluster this project was modelled on, and the limits of its GPUs
report       the predictions as text or JSON
"""
