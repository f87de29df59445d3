"""Drafts for a step that is already submitted: the device waits for them, not the host.

The engine core's process writes the drafts of bound step `number` to shared memory. Then it opens the gate by writing
`number` to the first word of this memory. Every rank queues a wait for that word, and after it the copy to its device
and the rest of the step. On a GPU the stream waits; on a CPU the worker's thread waits. If the gate opens without new
drafts, the step reads old drafts. The target verifies these like any others, so the committed tokens stay exact.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

BOUND_STEP = "outrider_bound_step"  # attribute of the SchedulerOutput of a step whose drafts come later: a `BoundStep`
_RING = 4  # Steps whose drafts are kept. At most two steps are in flight, and an ended step has copied its drafts.
_HEADER_BYTES = 64  # The word, and padding that puts the drafts into other cache lines.
_POLL_SECONDS = 5e-5  # Time on a CPU between two reads of the word.
_WORD = 2**32


@dataclass(frozen=True, slots=True)
class BoundStep:
    """Message to the ranks, sent with a step: the requests that have drafts behind the gate."""

    gate: str  # path of the gate's file
    number: int  # number of the bound step, from 1
    request_ids: tuple[str, ...]
    max_requests: int
    max_drafts: int


class _Memory:
    """The shared memory `buffer`: `word`, uint32 [1], and `drafts`, int64 [steps, requests, drafts]."""

    def __init__(self, buffer: mmap.mmap, max_requests: int, max_drafts: int) -> None:
        self.buffer = buffer
        self.word = np.frombuffer(buffer, np.uint32, 1)
        shape = (_RING, max_requests, max_drafts)
        self.drafts: npt.NDArray[np.int64] = np.frombuffer(
            buffer, np.int64, int(np.prod(shape)), _HEADER_BYTES
        ).reshape(shape)

    @staticmethod
    def num_bytes(max_requests: int, max_drafts: int) -> int:
        return _HEADER_BYTES + _RING * max_requests * max_drafts * 8


class DraftGate:
    """The engine core's side of the gate."""

    def __init__(self, max_requests: int, max_drafts: int) -> None:
        self._max_requests, self._max_drafts = max_requests, max_drafts
        num_bytes = _Memory.num_bytes(max_requests, max_drafts)
        self._file = os.memfd_create("outrider-draft-gate")
        os.ftruncate(self._file, num_bytes)
        self._memory = _Memory(mmap.mmap(self._file, num_bytes), max_requests, max_drafts)
        self._path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._num_bound = self._num_open = 0
        self._opening = threading.Lock()

    def bind(self, request_ids: Sequence[str]) -> BoundStep:
        """Returns the message for the next step that waits at the gate."""
        self._num_bound += 1
        return BoundStep(self._path, self._num_bound, tuple(request_ids), self._max_requests, self._max_drafts)

    def open(self, step: BoundStep, drafts: Sequence[Sequence[int]] | None) -> bool:
        """Opens the gate of `step` with `drafts`, one sequence per request; None: without new drafts.

        Returns False, and writes nothing, if the gate was already open: ranks may have read the drafts. Thread-safe.
        """
        with self._opening:
            if step.number <= self._num_open:
                return False
            self._num_open = step.number
            rows = self._memory.drafts[step.number % _RING]
            for row, token_ids in zip(rows, drafts or (), strict=False):
                row[: len(token_ids)] = token_ids
                row[len(token_ids) :] = token_ids[-1] if token_ids else 0  # fills a row up: any token ID is valid
            self._memory.word[0] = step.number % _WORD
            return True


class DraftReader:
    """A rank's side of the gate, for one device."""

    def __init__(self, step: BoundStep, device: torch.device) -> None:
        """Opens the shared memory of the gate of `step`. Raises RuntimeError if the device cannot wait for it."""
        num_bytes = _Memory.num_bytes(step.max_requests, step.max_drafts)
        file = os.open(step.gate, os.O_RDWR)
        try:
            buffer = mmap.mmap(file, num_bytes)
        finally:
            os.close(file)
        self._memory = _Memory(buffer, step.max_requests, step.max_drafts)
        self._device = device
        self._word_address = _register(self._memory.word, num_bytes) if device.type == "cuda" else 0
        self._rings = [torch.from_numpy(drafts) for drafts in self._memory.drafts]

    def read(self, step: BoundStep) -> torch.Tensor:
        """Returns the drafts of `step` on the device, int64 [num_requests, max_drafts].

        On a CPU this waits until the gate is open. On a GPU it returns at once, and later work in the current stream
        waits.
        """
        if self._device.type == "cuda":
            _wait_in_stream(torch.cuda.current_stream().cuda_stream, self._word_address, step.number % _WORD)
        else:
            while self._is_closed(step):
                time.sleep(_POLL_SECONDS)
        return self._rings[step.number % _RING][: len(step.request_ids)].to(self._device, non_blocking=True)

    def _is_closed(self, step: BoundStep) -> bool:
        return 0 < (step.number - int(self._memory.word[0])) % _WORD < _WORD // 2


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _register(word: npt.NDArray[np.uint32], num_bytes: int) -> int:
    """Maps the memory that begins with `word` for the GPU. Returns the device's address of the word."""
    host = word.ctypes.data
    portable_and_mapped = 1 | 2
    failed = torch.cuda.cudart().cudaHostRegister(host, num_bytes, portable_and_mapped)  # type: ignore[no-untyped-call]
    if int(failed) != 0:
        raise RuntimeError(f"CUDA cannot read the memory of drafts: cudaHostRegister returned {failed}")
    address = ctypes.c_uint64()
    _check(
        _driver().cuMemHostGetDevicePointer_v2(ctypes.byref(address), ctypes.c_void_p(host), ctypes.c_uint(0)),
        "cuMemHostGetDevicePointer",
    )
    return address.value


def _wait_in_stream(stream: int, address: int, number: int) -> None:
    """Makes later work in `stream` wait until the word at `address` is `number` or a later number."""
    until_reached = 0  # CU_STREAM_WAIT_VALUE_GEQ: (int32)(word - number) >= 0
    failed = _driver().cuStreamWaitValue32_v2(
        ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint32(number), ctypes.c_uint(until_reached)
    )
    _check(failed, "cuStreamWaitValue32")


def _check(failed: int, what: str) -> None:
    if failed:
        raise RuntimeError(f"{what} returned CUDA error {failed}: this GPU cannot wait for drafts; use the V1 runner")
