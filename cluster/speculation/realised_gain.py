"""Compares the tokens per second of steps with drafts with their prediction, and with steps without drafts.

Everything that the cost model leaves out (waits that differ, drafts that come late, drafts that slow the target down)
shows as a difference between predicted and measured tokens per second. Acceptance is learned elsewhere, so in the
comparison with the prediction a step counts the expected tokens of its drafts.
"""

from __future__ import annotations

_RATE = 1 / 64  # learning rate per step: tokens per step scatter by a half, their average then by 4 %
_FORGET_RATE = 1 / 1024  # learning rate per step without drafts, back to the initial prediction
_BOUNDS = (0.5, 1.5)  # bounds of the share: beyond them, something other than the model's error was measured


class RealisedGain:
    """Exponential averages over the steps with drafts.

    `share`: measured over predicted tokens per second. `gain`: measured tokens per second with drafts over those
    without.
    """

    def __init__(self) -> None:
        self.share = 1.0
        self.gain = 1.0
        self._num_gains = 0  # drafted steps since a step without drafts

    def observe_share(self, share: float) -> None:
        """Learns from a step with drafts.

        `share`: the tokens per second that its drafts were expected to yield in its duration, over those predicted.
        """
        low, high = _BOUNDS
        self.share = min(max(self.share + _RATE * (share - self.share), low), high)

    def observe_gain(self, gain: float) -> None:
        """Learns from a step with drafts. `gain`: its tokens per second over those of a step without drafts."""
        self._num_gains += 1
        self.gain += max(_RATE, 1 / self._num_gains) * (gain - self.gain)

    def forget(self) -> None:
        """Records a step without drafts: moves `share` towards 1 and resets `gain`."""
        self.share += _FORGET_RATE * (1.0 - self.share)
        self.gain, self._num_gains = 1.0, 0
