"""Computes from measurements the limits of the gain of a cluster's speculation. No I/O."""
