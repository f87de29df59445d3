"""`FairQueue` as the queue of vLLM's scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from cluster.engine.fair_queue import FairQueue
from cluster.vllm.coupling import extra_args_of

OWNER_KEY = "outrider_owner"  # key of a request's owner in `extra_args`


def owner_of(request: Request) -> bytes:
    return cast(bytes, extra_args_of(request.sampling_params).get(OWNER_KEY, b""))


class OwnersQueue(RequestQueue):
    def __init__(self, num_places: int, num_kv_tokens: int, running: Callable[[], Sequence[Request]]) -> None:
        self.fair: FairQueue[Request] = FairQueue(owner_of, num_places, num_kv_tokens)
        self._running = running

    def add_request(self, request: Request) -> None:
        self.fair.add(request)

    def prepend_request(self, request: Request) -> None:
        self.fair.add(request, is_first=True)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.prepend_request(request)

    def peek_request(self) -> Request:
        return self.fair.first(self._running())

    def pop_request(self) -> Request:
        request = self.peek_request()
        self.fair.take(request)
        return request

    def remove_request(self, request: Request) -> None:
        self.fair.remove((request,))

    def remove_requests(self, requests: Iterable[Request]) -> None:
        self.fair.remove(set(requests))

    def __bool__(self) -> bool:
        return bool(self.fair)

    def __len__(self) -> int:
        return len(self.fair)

    def __iter__(self) -> Iterator[Request]:
        return self.fair.in_order(self._running())
