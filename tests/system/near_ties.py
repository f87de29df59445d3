"""Judge of near-ties: differing answers whose choice depends on the last bits of float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from cluster.engine.batch import Segment
from cluster.engine.runner import ModelRunner
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.speculation.sampling import SampleRequest, perturbed_logits
from tests.system.client import Case

BOUND = 1e-4
"""On the gap of logit/T + g between two choices, and on the relative distance to a filter's threshold."""


class NearTieJudge:
    """Recomputes the choice at the first difference from the prefix alone, in one chunk, without speculation."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def is_near_tie(self, case: Case, answer: Sequence[int], other: Sequence[int]) -> bool:
        """Returns whether `answer` and `other`, two answers to `case`, first differ at a near-tie."""
        position = next(i for i, (a, b) in enumerate(zip(answer, other, strict=False)) if a != b)
        prefix = [*case.prompt, *answer[:position]]
        scores = [self._scores(case, prefix, params) for params in _perturbed(_params(case))]
        a, b = answer[position], other[position]
        best = max(float(s.max()) for s in scores)
        # Each of the two must be within the bound of winning under some perturbation of the filters.
        return all(max(float(s[token] - s.max()) for s in scores) > -BOUND for token in (a, b)) and best > -torch.inf

    def choice(self, case: Case, answer: Sequence[int]) -> int:
        """The token after the prompt and `answer`."""
        return int(self._scores(case, [*case.prompt, *answer], _params(case)).argmax())

    def _scores(self, case: Case, prefix: list[int], params: SamplingParams) -> torch.Tensor:
        blocks = self._runner.blocks
        table = blocks.allocate(blocks.num_blocks_for(len(prefix)))
        assert table is not None
        try:
            logits = self._runner.run([Segment(prefix, 0, table, num_logits=1)])
        finally:
            blocks.free(table)
        request = SampleRequest(params, NoiseKey.derive(case.seed, 0), prefix, len(case.prompt))
        return perturbed_logits(logits, [request])[0]


def _params(case: Case) -> SamplingParams:
    fields = {name: value for name, value in case.fields.items() if name != "ignore_eos"}
    bias = fields.pop("logit_bias", {})
    return SamplingParams(**fields, logit_bias=tuple((int(token), value) for token, value in bias.items()))


def _perturbed(params: SamplingParams) -> list[SamplingParams]:
    """`params`, and with its filters moved by the bound either way."""
    moved = [params]
    for factor in (1 - BOUND, 1 + BOUND):
        values = {field.name: getattr(params, field.name) for field in dataclasses.fields(params) if field.init}
        values["top_p"] = min(1.0, params.top_p * factor)
        values["min_p"] = params.min_p * factor
        moved.append(SamplingParams(**values))
    return moved
