"""What keeps a cluster's speculation from paying more: reckoned from what was measured of it. No I/O."""
