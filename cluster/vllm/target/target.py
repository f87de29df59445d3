"""The target in the worker's process: passes requests to vLLM, and publishes the engine core's tokens."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from vllm import AsyncEngineArgs
from vllm import SamplingParams as VllmSamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from cluster.config import V2_RUNNER, Config
from cluster.constraints import UNCONSTRAINED
from cluster.coordination.timeline import Timeline
from cluster.engine.limits import StepLimits
from cluster.engine.loader import resolve_device
from cluster.engine.model_config import eos_token_ids
from cluster.errors import (
    ConfigurationError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OutriderError,
    first_line,
)
from cluster.model_folder import resolve_model_folder
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.speculation.tuning import TRIAL_DEPTHS, TRIAL_SECONDS
from cluster.targets.base import (
    GenerationOutput,
    GenerationRequest,
    Publish,
    Target,
    TargetLoad,
    TargetModel,
    no_adapter,
)
from cluster.telemetry.metrics import Reading
from cluster.vllm.channel import (
    ChannelListener,
    Endpoints,
    Failed,
    Outputs,
    Profiled,
    Status,
    VocabularyMessage,
)
from cluster.vllm.constraints import to_extra_args
from cluster.vllm.core.device_rounds import TRIED_STEPS
from cluster.vllm.core.owners_queue import OWNER_KEY
from cluster.vllm.core.profiling import STEPS
from cluster.vllm.core.target_scheduler import ASYNC_SCHEDULER, REQUEST_ID_KEY, SCHEDULER, TRACED_KEY, CoreSettings
from cluster.vllm.coupling import Coupling, fields_of
from cluster.vllm.engine_args import (
    COUPLED_SAMPLING,
    allow_bias,
    carrier,
    check_numerics,
    check_verifies,
    common_engine_args,
    make_args,
)
from cluster.vllm.runner.sampling import EXTENSION
from cluster.vllm.target.adapter_folder import BaseModel
from cluster.vllm.target.adapters import Adapter, Adapters
from cluster.vllm.target.lora import LoraLimits

logger = logging.getLogger(__name__)

_LAST_WORDS_SECONDS = 10.0  # An older error is not the reason why the engine core ended.
_SHUTDOWN_SECONDS = 2.0  # Time for the engine core to end by itself.
_SILENT_SECONDS = 5.0  # An engine that has work and sends no status for longer counts as stuck.
_WITH_A_MODEL = ("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "dflash")
_PROPOSER = "cluster.vllm.runner.proposer.NoProposer"
_T = TypeVar("_T")


class VllmTarget(Target):
    """vLLM in its own processes. Its client runs in a thread with an event loop."""

    def __init__(self, config: Config, tokenizer_fingerprint: str, *, on_v2: bool) -> None:
        """Loads the model. `on_v2`: whether vLLM uses its V2 model runner. Raises ConfigurationError."""
        target, folder = config.target, resolve_model_folder(config.target.model)
        check_numerics(target, target.numerics)
        self._on_v2 = on_v2
        if on_v2 and config.needs_v1_runner is not None:
            raise ConfigurationError(
                f"{config.needs_v1_runner} is not available on vLLM's V2 runner; unset {V2_RUNNER}"
            )
        if config.drafts_in_process and not on_v2:
            why_not = f"leave {config.needs_v1_runner} out" if config.needs_v1_runner else f"set {V2_RUNNER}=1"
            raise ConfigurationError(f"draft.placement in-process needs vLLM's V2 runner: {why_not}")
        logger.info("vLLM's %s model runner", "V2" if on_v2 else "V1")
        self._drafts_on_device = self._on_v2 and (config.drafts_in_process or config.draft.drafter == "engine")
        self._config = config
        self._is_coupled = config.speculation.acceptance != "engine"
        self._drafts = config.speculation.num_speculative_tokens > 0
        self._publish: Publish = lambda _: None
        self._running: dict[str, asyncio.Task[None]] = {}
        self._status: Status | None = None
        self._timeline = Timeline()  # copy of the timeline in the engine core's process, received through the channel
        self._heard_at = time.monotonic()
        self._failed: tuple[str, float] = ("", 0.0)  # the last error of the engine core, with its time
        self._is_stopping = False
        self._adapters: Adapters | None = None
        if target.takes_adapters:
            self._adapters = Adapters(target, BaseModel.of(folder), LoraLimits.of(target))
        self._sending_vocabulary = asyncio.Lock()
        self._has_sent_vocabulary = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-client", daemon=True)
        self._thread.start()
        listener = ChannelListener()
        try:
            adapters = self._adapters.configured(target) if self._adapters is not None else []
            self._llm = self._call(self._start(folder, tokenizer_fingerprint, listener.address))
            self._channel = listener.accept(self._receive, self._core_ended)
        except OutriderError:
            self._remove_copies()
            raise
        except (ValueError, RuntimeError, OSError) as error:
            self._remove_copies()
            raise ConfigurationError(f"vLLM cannot run {target.model!r}: {first_line(error)}") from error
        finally:
            listener.close()
        if self._adapters is not None:
            self._adapters.connect(self._llm, self._set_error)
            self._load_configured(self._adapters, adapters)
        if config.has_draft_workers or self._drafts_on_device:
            self._call(self._profile())
        model = self._llm.model_config
        self.model = TargetModel(
            target.model, str(model.dtype).removeprefix("torch."), model.get_vocab_size(), eos_token_ids(folder)
        )
        self.limits = StepLimits.of(target, model.max_model_len)
        cache = self._llm.vllm_config.cache_config
        self.block_size, self.caches_prefixes = cache.block_size, bool(cache.enable_prefix_caching)

    async def _start(self, folder: Any, tokenizer_fingerprint: str, channel: str) -> AsyncLLM:
        values = common_engine_args(self._config.target)
        ours: dict[str, Any] = {
            "worker_extension_cls": EXTENSION,
            "scheduler_cls": SCHEDULER,
        }
        if self._on_v2:
            ours |= {
                "scheduler_cls": ASYNC_SCHEDULER,
                "async_scheduling": True,
                "logits_processors": [COUPLED_SAMPLING],
            }
            # With the runner in its own process, the coordinator continues while a launch waits for the device, and the
            # two do not compete for one interpreter lock.
            ours |= {"distributed_executor_backend": "mp"}
            allow_bias()
        if self._config.target.takes_adapters:
            ours |= LoraLimits.of(self._config.target).engine_args()
        args = make_args(AsyncEngineArgs, {**values, **ours})
        args.speculative_config = self._speculative_config()
        if args.speculative_config is not None:
            check_verifies(args.create_model_config(), resolve_device(self._config.target.device))
        args.additional_config = CoreSettings(channel, self._config, tokenizer_fingerprint, self._drafts_on_device)
        llm = AsyncLLM.from_engine_args(args)
        if self._is_coupled and not self._on_v2:
            await llm.collective_rpc("install_coupled_sampling")
        if self._config.target.takes_adapters:
            await llm.collective_rpc("prepare_adapters")
        return llm

    def _load_configured(self, adapters: Adapters, configured: Sequence[Adapter]) -> None:
        for adapter in configured:
            try:
                self._call(adapters.add(adapter))
            except InvalidRequestError as error:
                self.stop()
                raise ConfigurationError(f"target.lora {adapter.name!r}: {error}") from error

    async def _profile(self) -> None:
        """Sends requests that make the engine core run steps with an increasing number of rows."""
        started_at, num_sequences = time.monotonic(), 1
        while num_sequences <= self._config.target.max_num_seqs and time.monotonic() < started_at + TRIAL_SECONDS:
            await asyncio.gather(*(self._try_steps(number) for number in range(num_sequences)))
            num_sequences *= 4
        self._channel.send(Profiled())

    async def _try_steps(self, number: int) -> None:
        prompt = [number, 1]
        # Enough tokens for `STEPS` steps with drafts of every depth. Drafts made on the device are sometimes right, so
        # their steps may commit several tokens.
        num_tokens = STEPS + self._config.speculation.max_speculative_tokens + 1
        if self._drafts_on_device:
            num_tokens = TRIED_STEPS * max(TRIAL_DEPTHS) // 2
        params = VllmSamplingParams(
            temperature=0.0,
            max_tokens=min(
                num_tokens,
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
        most = speculation.max_speculative_tokens
        if self._config.drafts_in_process:
            own: dict[str, Any] = {"method": "draft_model", "num_speculative_tokens": most}
        elif draft.drafter != "engine":
            if self._on_v2:
                return carrier(most)
            return {"method": "custom_class", "model": _PROPOSER, "num_speculative_tokens": most}
        else:
            number = most if self._drafts_on_device else speculation.num_speculative_tokens
            own = {"num_speculative_tokens": number, **draft.speculative_config}
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
        self._remove_copies()

    async def run_links(self, endpoints: AsyncIterator[Sequence[str]]) -> None:
        try:
            async for addresses in endpoints:
                self._channel.send(Endpoints(tuple(addresses)))
            await asyncio.Event().wait()
        finally:
            self._channel.send(Endpoints(()))

    def submit(self, request: GenerationRequest) -> None:
        """Adds a request. The cache has room for every request: vLLM does not start with a smaller cache."""
        if not self._is_coupled and self._drafts and (request.params.min_p or request.params.logit_bias):
            field = "min_p" if request.params.min_p else "logit_bias"
            raise InvalidRequestError(
                f"{field} is not available with speculation.acceptance engine: vLLM does not support it with "
                "speculation",
                param=field,
            )
        if not self._is_coupled and request.constraints != UNCONSTRAINED:
            raise InvalidRequestError("constraints of the answer are not available with speculation.acceptance engine")
        if request.grammar is not None and not self.model.eos_token_ids:
            raise InvalidRequestError("a grammar needs a model with an end-of-sequence token on this engine")
        adapter = self._acquire(request)
        self._loop.call_soon_threadsafe(self._submit, request, adapter)

    def abort(self, request_id: str) -> None:
        self._loop.call_soon_threadsafe(self._abort, request_id)

    @property
    def adapters(self) -> Mapping[str, str]:
        return {} if self._adapters is None else self._adapters.fingerprints

    async def load_adapter(self, name: str, path: str, *, replace: bool) -> str:
        if self._adapters is None:
            raise InvalidRequestError("this target has no adapters: start it with target.lora_root")
        return await self._finished(self._adapters.load(name, path, replace=replace))

    async def unload_adapter(self, name: str) -> int:
        if self._adapters is None:
            raise NotFoundError(no_adapter(name))
        return await self._finished(self._adapters.unload(name))

    def load(self) -> TargetLoad:
        status = self._status
        return status.load if status is not None else TargetLoad(0, 0, 0, self._num_blocks, 0)

    @property
    def timeline(self) -> Timeline | None:
        """Timeline of the rounds; None without draft workers, because there are no rounds."""
        return self._timeline if self._config.has_draft_workers else None

    def readings(self) -> Iterable[Reading]:
        stuck = "1 while the engine has work and makes no progress."
        yield Reading("outrider_engine_stuck", stuck, float(self.is_stuck))
        if self._adapters is not None:
            loaded = "LoRA adapters that requests can use."
            yield Reading("outrider_lora_adapters", loaded, float(len(self._adapters.fingerprints)))
        yield from self._status.readings if self._status is not None else ()

    @property
    def _num_blocks(self) -> int:
        return self._llm.vllm_config.cache_config.num_gpu_blocks or 0

    def _remove_copies(self) -> None:
        if self._adapters is not None:
            self._adapters.close()

    def _acquire(self, request: GenerationRequest) -> Adapter | None:
        if not request.adapter:
            return None
        if self._adapters is None:
            raise NotFoundError(no_adapter(request.adapter))
        return self._adapters.acquire(request.adapter, request.adapter_fingerprint)

    async def _finished(self, change: Coroutine[Any, Any, _T]) -> _T:
        """Runs `change` in the client's thread and returns its result. Cancelling the caller does not stop it."""
        return await asyncio.shield(asyncio.wrap_future(asyncio.run_coroutine_threadsafe(change, self._loop)))

    # The client's thread.

    def _submit(self, request: GenerationRequest, adapter: Adapter | None) -> None:
        task = self._loop.create_task(self._generate(request, adapter))
        self._running[request.request_id] = task
        if adapter is not None and self._adapters is not None:
            release = self._adapters.release  # a callback, because a task that is cancelled at once never begins
            task.add_done_callback(lambda _: release(adapter))

    def _abort(self, request_id: str) -> None:
        task = self._running.pop(request_id, None)
        if task is not None:
            task.cancel()

    async def _generate(self, request: GenerationRequest, adapter: Adapter | None) -> None:
        """Runs the request to its end. Its tokens arrive over the channel; `_receive` publishes them."""
        try:
            if request.grammar is not None:
                await self._send_vocabulary(request.grammar.vocabulary)
            prompt: dict[str, Any] = {"prompt_token_ids": request.token_ids}
            if request.cache_salt:
                prompt["cache_salt"] = request.cache_salt
            params = self._sampling_params(request)
            async for output in self._llm.generate(
                prompt,
                params,
                request.request_id,
                lora_request=None if adapter is None else adapter.request(),
                priority=request.priority,
            ):
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

    async def _send_vocabulary(self, written: str) -> None:
        """Sends the vocabulary to the processes that use grammars, before the first request with a grammar."""
        async with self._sending_vocabulary:
            if not self._has_sent_vocabulary:
                self._channel.send(VocabularyMessage(written))
                if not self._on_v2:  # in the V1 runner the engine core makes the masks
                    await self._llm.collective_rpc("know_grammar_vocabulary", args=(written,))
                self._has_sent_vocabulary = True

    def _fail(self, request: GenerationRequest, error: OutriderError) -> None:
        self._publish([GenerationOutput(request.request_id, (), None, 0, 0, error)])

    def _sampling_params(self, request: GenerationRequest) -> VllmSamplingParams:
        k = request.num_speculative_tokens
        coupling = Coupling(
            request.params, request.noise_key, request.num_prompt_tokens, k, request.conversation, request.output_limit
        )
        values = fields_of(request.params) | {"logit_bias": dict(request.params.logit_bias) or None}  # vLLM's names
        if self._is_coupled:  # for vLLM all requests are greedy
            shaped = (
                ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias") if self._on_v2 else ()
            )
            values = {name: values[name] for name in shaped} | {"temperature": 0.0}
        end_token_ids = request.end_token_ids(self.model)
        grammar = None if request.grammar is None else request.grammar.written
        constraints = to_extra_args(request.constraints, end_token_ids, grammar)
        ours: dict[str, Any] = {REQUEST_ID_KEY: request.request_id, OWNER_KEY: request.owner}
        if request.is_traced:
            ours[TRACED_KEY] = True
        return VllmSamplingParams(
            **values,
            max_tokens=request.num_prompt_tokens + request.max_tokens - len(request.token_ids),
            # Our rule for the end of a sequence is the same on every engine, so vLLM's own rule is off.
            ignore_eos=True,
            stop_token_ids=sorted(end_token_ids),
            logprobs=request.num_logprobs,
            prompt_logprobs=request.num_prompt_logprobs,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={**coupling.to_extra_args(), **constraints, **ours},
        )

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # The channel's thread.

    def _receive(self, message: Any) -> None:
        match message:
            case Outputs(outputs):
                self._publish(outputs)
                for output in outputs:
                    if output.error is not None:  # only our constraints raise this error, so vLLM continues
                        self.abort(output.request_id)
            case Status():
                self._status, self._heard_at = message, time.monotonic()
                self._timeline.add(message.news)
            case Failed(cause):
                self._failed = cause, time.monotonic()

    def _core_ended(self) -> None:
        if not self._is_stopping:
            self._set_error()

    def _set_error(self) -> None:
        """Sets `error`. The main program watches `error`, and ends the process."""
        if self.error is None:
            cause, failed_at = self._failed
            is_recent = time.monotonic() < failed_at + _LAST_WORDS_SECONDS
            self.error = InternalError(
                f"vLLM's engine core has ended: {cause if is_recent else 'its own message, if any, is above'}"
            )
            logger.error("%s", self.error)
