"""Computes from measurements what limits the gain of a cluster's speculation. No I/O."""
