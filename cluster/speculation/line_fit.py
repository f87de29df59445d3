"""Fits a line to pairs of numbers by least squares, in which older pairs lose weight."""

from __future__ import annotations


class LineFit:
    """Weighted means, variances and covariance of the pairs (x, y)."""

    def __init__(self, keep: float) -> None:
        """`keep`: factor of the weight of earlier pairs, per pair."""
        self._keep = keep
        self.weight = 0.0
        self.mean_x = self.mean_y = 0.0
        self.variance_x = self.variance_y = self.covariance = 0.0

    def observe(self, x: float, y: float) -> None:
        self.weight = self._keep * self.weight + 1.0
        share = 1.0 / self.weight
        off_x, off_y = x - self.mean_x, y - self.mean_y
        self.mean_x += share * off_x
        self.mean_y += share * off_y
        self.variance_x = (1.0 - share) * (self.variance_x + share * off_x * off_x)
        self.variance_y = (1.0 - share) * (self.variance_y + share * off_y * off_y)
        self.covariance = (1.0 - share) * (self.covariance + share * off_x * off_y)
