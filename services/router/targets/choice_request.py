"""The request for one choice, independent of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protos.speculation.v1 import target_pb2
from services.router.targets.affinity import RoutingKey


@dataclass(frozen=True, slots=True)
class ChoiceRequest:
    """The request for one choice.

    Its message is only made when it is sent, because the choices of a request share most of these fields.
    """

    template: target_pb2.GenerateRequest  # without the fields below
    prompt_token_ids: Sequence[int]
    max_tokens: int
    choice_index: int
    routing_key: RoutingKey

    @property
    def num_tokens(self) -> int:
        """Number of token IDs that a target must hold while the choice waits."""
        return len(self.prompt_token_ids) + len(self.template.constraints.allowed_token_ids)

    @property
    def num_prompt_logprobs(self) -> int | None:
        has_some = self.template.HasField("num_prompt_logprobs")
        return self.template.num_prompt_logprobs if has_some else None

    @property
    def may_speculate(self) -> bool:
        return not self.template.HasField("num_speculative_tokens") or self.template.num_speculative_tokens > 0

    def to_wire(self, token_ids: Sequence[int] = ()) -> target_pb2.GenerateRequest:
        """Returns the message to a target. `token_ids`: tokens that another target generated."""
        message = target_pb2.GenerateRequest(
            prompt_token_ids=self.prompt_token_ids,
            max_tokens=self.max_tokens,
            choice_index=self.choice_index,
            num_generated_tokens=len(token_ids),
            conversation=self.routing_key.conversation,
        )
        message.MergeFrom(self.template)
        if token_ids:
            message.prompt_token_ids.extend(token_ids)
            message.ClearField("num_prompt_logprobs")  # the other target sent them before its tokens
        return message
