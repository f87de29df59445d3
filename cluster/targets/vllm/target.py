"""The target in the worker's process: hands requests to vLLM, and publishes what its engine core commits."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from typing import Any

from vllm import AsyncEngineArgs
from vllm import SamplingParams as VllmSamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from cluster.config import Config
from cluster.engine.limits import StepLimits
from cluster.engine.model_config import eos_token_ids
from cluster.errors import ConfigurationError, InternalError, InvalidRequestError, OutriderError, first_line
from cluster.model_folder import resolve_model_folder
from cluster.place import Place
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.targets.base import GenerationOutput, GenerationRequest, Publish, Target, TargetLoad, TargetModel
from cluster.targets.vllm.channel import ChannelListener, Endpoints, Failed, Outputs, Profiled, Status
from cluster.targets.vllm.core import REQUEST_ID_KEY, SCHEDULER, TRACED_KEY, CoreSettings
from cluster.targets.vllm.profiling import STEPS
from cluster.telemetry.metrics import Reading
from cluster.vllm.coupling import Coupling
from cluster.vllm.engine_args import check_numerics, common_engine_args, make_args
from cluster.vllm.sampling import EXTENSION

logger = logging.getLogger(__name__)

_PROFILE_SECONDS = 1.0  # after so long no more sequences are tried at once
_LAST_WORDS_SECONDS = 10.0  # an older error is not what the engine core ended with
_SHUTDOWN_SECONDS = 2.0  # for the engine core to end by itself
_SILENT_SECONDS = 5.0  # without news of an engine that has work
_WITH_A_MODEL = ("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "dflash")
_PROPOSER = "cluster.vllm.proposer.NoProposer"


class VllmTarget(Target):
    """vLLM in processes of its own. Its client runs in a thread with an event loop."""

    def __init__(self, config: Config, tokenizer_fingerprint: str) -> None:
        """Loads the model. Raises ConfigurationError."""
        target, folder = config.target, resolve_model_folder(config.target.model)
        check_numerics(target, target.numerics)
        self._config = config
        self._is_coupled = config.speculation.acceptance != "engine"
        self._drafts = config.speculation.num_speculative_tokens > 0
        self._publish: Publish = lambda _: None
        self._running: dict[str, asyncio.Task[None]] = {}
        self._status: Status | None = None
        self._heard_at = time.monotonic()
        self._failed: tuple[str, float] = ("", 0.0)  # the last error of the engine core, and when it came
        self._is_stopping = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-client", daemon=True)
        self._thread.start()
        listener = ChannelListener()
        try:
            self._llm = self._call(self._start(folder, tokenizer_fingerprint, listener.address))
            self._channel = listener.accept(self._receive, self._core_ended)
        except (ValueError, RuntimeError, OSError) as error:
            raise ConfigurationError(f"vLLM cannot run {target.model!r}: {first_line(error)}") from error
        finally:
            listener.close()
        if config.has_draft_workers:
            self._call(self._profile())
        model = self._llm.model_config
        self.model = TargetModel(
            target.model, str(model.dtype).removeprefix("torch."), model.get_vocab_size(), eos_token_ids(folder)
        )
        self.limits = StepLimits.of(target, model.max_model_len)
        self.block_size = self._llm.vllm_config.cache_config.block_size

    async def _start(self, folder: Any, tokenizer_fingerprint: str, channel: str) -> AsyncLLM:
        speculation, values = self._config.speculation, common_engine_args(self._config.target)
        args = make_args(AsyncEngineArgs, {**values, "worker_extension_cls": EXTENSION, "scheduler_cls": SCHEDULER})
        args.speculative_config = self._speculative_config()
        placement = self._config.placement
        args.additional_config = CoreSettings(
            channel,
            speculation,
            self._config.has_draft_workers,
            tokenizer_fingerprint,
            Place.own(placement, os.environ),
            placement.trial_share,
        )
        llm = AsyncLLM.from_engine_args(args)
        if self._is_coupled:
            await llm.collective_rpc("install_coupled_sampling")
        return llm

    async def _profile(self) -> None:
        """Has the engine core try steps of more and more rows."""
        started_at, num_sequences = time.monotonic(), 1
        while num_sequences <= self._config.target.max_num_seqs and time.monotonic() < started_at + _PROFILE_SECONDS:
            await asyncio.gather(*(self._try_steps(number) for number in range(num_sequences)))
            num_sequences *= 4
        self._channel.send(Profiled())

    async def _try_steps(self, number: int) -> None:
        prompt = [number, 1]
        params = VllmSamplingParams(
            temperature=0.0,
            max_tokens=min(
                # As many as leave room for drafts of every depth to the last of the steps.
                STEPS + self._config.speculation.max_speculative_tokens + 1,
                self._llm.model_config.max_model_len - len(prompt),
            ),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=Coupling(SamplingParams(temperature=0.0), NoiseKey(0, 0), len(prompt)).to_extra_args(),
        )
        async for _ in self._llm.generate({"prompt_token_ids": prompt}, params, f"profile {number}"):
            pass

    def _speculative_config(self) -> dict[str, Any] | None:
        speculation, draft = self._config.speculation, self._config.draft
        if speculation.num_speculative_tokens == 0:
            return None
        if draft.drafter != "engine":
            most = speculation.max_speculative_tokens
            return {"method": "custom_class", "model": _PROPOSER, "num_speculative_tokens": most}
        own = {"num_speculative_tokens": speculation.num_speculative_tokens, **draft.speculative_config}
        if own.get("method") in _WITH_A_MODEL and "model" not in own:
            own["model"] = str(resolve_model_folder(draft.model))
        return own

    # Any thread.

    @property
    def is_stuck(self) -> bool:
        status = self._status
        if status is None or not (self._running or status.is_stuck):
            return False
        return status.is_stuck or time.monotonic() - self._heard_at > _SILENT_SECONDS

    def start(self, publish: Publish) -> None:
        self._publish = publish

    def stop(self) -> None:
        self._is_stopping = True
        self._loop.call_soon_threadsafe(self._llm.shutdown, _SHUTDOWN_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def run_links(self, endpoints: AsyncIterator[Sequence[str]]) -> None:
        try:
            async for addresses in endpoints:
                self._channel.send(Endpoints(tuple(addresses)))
            await asyncio.Event().wait()
        finally:
            self._channel.send(Endpoints(()))

    def submit(self, request: GenerationRequest) -> None:
        """vLLM refuses to start where the cache does not hold the longest sequence: every request has room."""
        if not self._is_coupled and self._drafts and (request.params.min_p or request.params.logit_bias):
            field = "min_p" if request.params.min_p else "logit_bias"
            raise InvalidRequestError(
                f"{field} is not for speculation.acceptance engine: vLLM has none beside speculation", param=field
            )
        self._loop.call_soon_threadsafe(self._submit, request)

    def abort(self, request_id: str) -> None:
        self._loop.call_soon_threadsafe(self._abort, request_id)

    def load(self) -> TargetLoad:
        status = self._status
        return status.load if status is not None else TargetLoad(0, 0, 0, self._num_blocks, 0)

    def readings(self) -> Iterable[Reading]:
        stuck = "1 while the engine has work and stands still."
        yield Reading("outrider_engine_stuck", stuck, float(self.is_stuck))
        yield from self._status.readings if self._status is not None else ()

    @property
    def _num_blocks(self) -> int:
        return self._llm.vllm_config.cache_config.num_gpu_blocks or 0

    # The client's thread.

    def _submit(self, request: GenerationRequest) -> None:
        self._running[request.request_id] = self._loop.create_task(self._generate(request))

    def _abort(self, request_id: str) -> None:
        task = self._running.pop(request_id, None)
        if task is not None:
            task.cancel()

    async def _generate(self, request: GenerationRequest) -> None:
        """Sees the request through; its tokens are published when they come up the channel."""
        try:
            prompt = {"prompt_token_ids": request.token_ids}
            async for output in self._llm.generate(prompt, self._sampling_params(request), request.request_id):
                reason = output.outputs[0].finish_reason
                if reason not in ("stop", "length"):
                    self._fail(request, InternalError(f"vLLM ended the request: {reason}"))
        except EngineDeadError:
            self._set_error()
        except Exception as error:
            logger.exception("vLLM failed a request")
            self._fail(request, InternalError(f"vLLM failed the request: {first_line(error)}"))
        finally:
            self._running.pop(request.request_id, None)

    def _fail(self, request: GenerationRequest, error: OutriderError) -> None:
        self._publish([GenerationOutput(request.request_id, (), None, 0, 0, error)])

    def _sampling_params(self, request: GenerationRequest) -> VllmSamplingParams:
        k = request.num_speculative_tokens
        coupling = Coupling(request.params, request.noise_key, request.num_prompt_tokens, k)
        values: dict[str, Any] = {"temperature": 0.0} if self._is_coupled else _own_params(request)
        ours = {REQUEST_ID_KEY: request.request_id} | ({TRACED_KEY: True} if request.is_traced else {})
        return VllmSamplingParams(
            **values,
            max_tokens=request.num_prompt_tokens + request.max_tokens - len(request.token_ids),
            # What ends a sequence is the same for every engine; vLLM would look it up in its own way.
            ignore_eos=True,
            stop_token_ids=[] if request.ignore_eos else list(self.model.eos_token_ids),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={**coupling.to_extra_args(), **ours},
        )

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # The channel's thread.

    def _receive(self, message: Any) -> None:
        match message:
            case Outputs(outputs):
                self._publish(outputs)
            case Status():
                self._status, self._heard_at = message, time.monotonic()
            case Failed(cause):
                self._failed = cause, time.monotonic()

    def _core_ended(self) -> None:
        if not self._is_stopping:
            self._set_error()

    def _set_error(self) -> None:
        """Its main program, which watches `error`, ends the process."""
        if self.error is None:
            cause, failed_at = self._failed
            is_recent = time.monotonic() < failed_at + _LAST_WORDS_SECONDS
            self.error = InternalError(
                f"vLLM's engine core has ended: {cause if is_recent else 'its own message, if any, is above'}"
            )
            logger.error("%s", self.error)


def _own_params(request: GenerationRequest) -> dict[str, Any]:
    """For `acceptance: engine`, as vLLM calls them."""
    params = request.params
    return {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "logit_bias": dict(params.logit_bias) or None,
    }
