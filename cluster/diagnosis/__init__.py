"""Computes from measurements what keeps a cluster's speculation from paying more. No I/O."""
