"""What simulated engines share, for load, fault and planning runs.

All else in such a cluster is real: scheduler, blocks, rounds, wire.
"""
