"""Common parts of simulated engines, for load, fault and planning runs.

Everything else in such a cluster is real: scheduler, blocks, rounds, wire.
"""
