"""Compares steps with drafts to their predicted tokens per second, and to steps without drafts.

The cost model ignores some effects: different waits, late drafts, drafts that slow the target down. They show as a
difference between predicted and measured tokens per second. Errors of the predicted acceptance are left out: the
comparison with the prediction counts the tokens that a step's drafts were expected to yield, not the accepted ones.
"""

from __future__ import annotations

from cluster.speculation.tuning import CLIP, GAIN_RATE, RATE


class RealisedGain:
    """Exponential averages over the steps with drafts.

    `share`: ratio of measured to predicted tokens per second. `gain`: ratio of measured tokens per second with drafts
    to those without drafts.
    """

    def __init__(self) -> None:
        self.share = 1.0
        self.gain = 1.0
        self._num_gains = 0  # drafted steps since a step without drafts

    def observe_share(self, share: float) -> None:
        """Learns from a step with drafts.

        `share`: (expected tokens of its drafts / its measured duration) / (predicted tokens per second).
        """
        self.share += GAIN_RATE * (min(share, CLIP) - self.share)

    def observe_gain(self, gain: float) -> None:
        """Learns from a step with drafts. `gain`: its tokens per second over those of a step without drafts."""
        self._num_gains += 1
        self.gain += max(GAIN_RATE, 1 / self._num_gains) * (gain - self.gain)

    def forget(self) -> None:
        """Records that a probe has ended and no step has drafts: moves `share` towards 1 and resets `gain`."""
        self.share += RATE * (1.0 - self.share)
        self.gain, self._num_gains = 1.0, 0
