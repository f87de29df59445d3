"""The base of all endpoints that generate: read the request, tokenise, start the choices, answer."""

from __future__ import annotations

import abc
import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from cluster.constraints import Grammar
from cluster.tokenization import Tokenizer
from services.router.access.caller import caller_of
from services.router.api.answer import Answer
from services.router.api.generation import generate, interleave
from services.router.api.observer import AnswerObserver, ChoiceObserver
from services.router.api.reply import Reply
from services.router.api.request import ApiRequest, parse_request
from services.router.api.wire_requests import build_choice_requests, check_prompt
from services.router.errors import ModelNotFoundError, excerpt, noting_warnings, warning_headers
from services.router.http.body import read_json_body, to_json_object
from services.router.http.large_work import cost_of, run_in_thread_if_large
from services.router.http.middleware import request_id_of
from services.router.http.streaming import EventStream, until_disconnected
from services.router.metrics import RouterMetrics
from services.router.operators.switch import SpeculationSwitch
from services.router.operators.traffic_log import TrafficLog
from services.router.output.logprobs import LogprobsFormat
from services.router.output.message import Reader
from services.router.output.writer import ChoiceWriter, TextFormat
from services.router.page.feed import Feed
from services.router.targets.affinity import RoutingKey
from services.router.targets.choice_request import ChoiceRequest
from services.router.targets.prompt_budget import PromptBudget, StartWindow
from services.router.targets.replicas import AdapterRef, Limits, ReplicaPool

R = TypeVar("R", bound=ApiRequest)


@dataclass(frozen=True)
class Serving:
    """The served model, and the objects that all endpoints share."""

    model_id: str
    tokenizer: Tokenizer
    pool: ReplicaPool
    metrics: RouterMetrics
    feed: Feed
    switch: SpeculationSwitch
    budget: PromptBudget
    salts_by_key: bool  # whether each key has a prefix cache of its own
    max_body_bytes: int
    max_pause_seconds: float
    traffic: TrafficLog | None  # None: prompts are not logged
    sampling_defaults: Mapping[str, Any]  # default values of missing fields
    aliases: Mapping[str, str]  # further names of the model and of adapters

    def with_defaults(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Returns `fields` without nulls, plus the sampling defaults of missing fields."""
        return {**self.sampling_defaults, **{name: value for name, value in fields.items() if value is not None}}

    def room_of(self, request: ApiRequest) -> int | None:
        """Returns the most tokens that a prompt of `request` may have before it is truncated; None: unknown."""
        if request.truncate_prompt_tokens is not None or not self.pool.usable:
            return None
        return self.pool.limits().max_model_len

    def check_model(self, model: str | None) -> AdapterRef | None:
        """Returns the adapter that `model` names; None for the served model or None.

        Raises ModelNotFoundError if no target has it, and UnavailableError if none of the targets that have it can
        answer now.
        """
        if model is not None:
            model = self.aliases.get(model, model)
        if model in (None, self.model_id):
            return None
        adapter = self.pool.adapters().get(model)
        if adapter is None and self.pool.knows(model):
            raise self.pool.nobody()
        if adapter is None:
            raise ModelNotFoundError(
                f"the model {excerpt(model)} does not exist; this router serves {self.model_id!r}",
                param="model",
            )
        return adapter


@dataclass(frozen=True)
class _Prompts:
    token_ids: list[list[int]]
    routing_keys: list[RoutingKey]  # one for each prompt
    cache_salt: str
    owner: bytes  # who uses turns at targets
    output_token_ms: float | None  # limit of the request or else of its key; None: the target's
    echoes: list[str]  # text that each prompt's choices begin with; "" without `echo`


@dataclass(frozen=True)
class AnswerForm:
    """How the answers to a request are limited and read; prepared once, before its choices start."""

    grammar: Grammar | None = None  # None: the text is free
    reader: Reader | None = None  # None: all of an answer is content
    turn_end_ids: frozenset[int] = frozenset()  # tokens that end an answer in addition to the model's end tokens
    shown_special_tokens: Collection[int] = ()  # special tokens that stay in the text because the reader needs them


class ApiEndpoint(abc.ABC, Generic[R]):
    request_type: type[R]
    reply_type: ClassVar[type[Reply]]

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    @abc.abstractmethod
    def _encode(self, request: R) -> list[list[int]]:
        """Returns the token IDs of each prompt of `request`."""

    def _parse(self, fields: dict[str, Any]) -> R:
        """Returns the request with the body `fields`. Raises InvalidRequestError naming the field."""
        return parse_request(self.request_type, fields)

    def _answer_form(self, request: R, prompt: list[int]) -> AnswerForm:
        """Returns the form of the answers to `prompt`, the first prompt of `request`."""
        return AnswerForm(request.grammar)

    def _reply(self, request: R, reader: Reader | None, **frame: Any) -> Reply:
        """Returns the reply to `request`. `frame`: arguments that every reply takes."""
        return self.reply_type(**frame)

    async def create(self, http_request: Request) -> Response:
        """Answers `http_request`. If it raises OutriderError, nothing is left running."""
        observer = AnswerObserver(http_request.scope, self._serving.metrics, self._serving.feed)
        request, adapter, cost, warnings = await self._read(http_request)
        if request.request_id is not None:
            http_request.scope["state"]["client_request_id"] = request.request_id
        prompts = await self._tokenize(http_request.scope, request, adapter, cost)
        answer = await self._start(request, prompts, adapter, request_id_of(http_request.scope), observer, cost)
        headers = {"x-outrider-seed": str(answer.reply.seed)} | warning_headers(warnings)
        if request.stream:
            return EventStream(answer.events(), headers, answer.reply.failure)
        return await until_disconnected(http_request.receive, answer.whole(headers))

    async def _read(self, http_request: Request) -> tuple[R, AdapterRef | None, int, list[str]]:
        """Returns the checked request, the adapter that it names, its cost (`cost_of`), and warnings about it."""
        serving = self._serving
        body = await read_json_body(http_request, serving.max_body_bytes)

        def parse() -> tuple[R, list[str]]:
            with noting_warnings() as warnings:
                return self._parse(serving.with_defaults(to_json_object(body))), warnings

        request, warnings = await run_in_thread_if_large(cost_of(body), parse)
        if request.model not in (None, serving.model_id):  # may name an adapter, which only targets can list
            await serving.pool.wait_out_change()
        return request, serving.check_model(request.model), cost_of(body), warnings

    async def _tokenize(self, scope: Scope, request: R, adapter: AdapterRef | None, cost: int) -> _Prompts:
        """Tokenises the prompts of `request`, and truncates them as it asks.

        Takes their tokens from the router's budget of prompt tokens. Raises InvalidRequestError or OverloadedError if
        they do not fit.
        """
        serving = self._serving
        prompts = await run_in_thread_if_large(cost, lambda: self._encode(request))
        serving.budget.take(scope, sum(map(len, prompts)), request.prompt_field)
        await serving.pool.wait_out_change()
        limits = serving.pool.limits()
        prompts = [request.truncate(prompt, limits.max_model_len) for prompt in prompts]
        salt, caller = self._cache_salt(request, scope), caller_of(scope)
        owner = b"" if caller is None else caller.owner
        output_token_ms = request.outrider.output_token_ms
        if output_token_ms is None and caller is not None:
            output_token_ms = caller.output_token_ms
        root = f"{'' if adapter is None else adapter.fingerprint} {salt}"
        name = request.prompt_cache_key or Headers(scope=scope).get("x-session-id") or None  # a header may be empty

        def prepare() -> _Prompts:
            for prompt in prompts:
                check_prompt(prompt, limits.vocab_size, request.prompt_field)
            keys = [RoutingKey.of(prompt, opening=request.opening, name=name, root=root) for prompt in prompts]
            return _Prompts(prompts, keys, salt, owner, output_token_ms, self._echoes(request, prompts))

        return await run_in_thread_if_large(cost, prepare)

    def _cache_salt(self, request: R, scope: Scope) -> str:
        """Returns the salt of the request's KV.

        If each key has KV of its own, the salt begins with the key's name, which has no space: no client can make up
        the salt of another one.
        """
        salt, caller = request.cache_salt or "", caller_of(scope)
        return f"{caller.name} {salt}" if self._serving.salts_by_key and caller is not None else salt

    def _echoes(self, request: R, prompts: list[list[int]]) -> list[str]:
        """Returns the text that the choices of each prompt begin with: the prompt's with `echo`, else ""."""
        if not request.has_echo:
            return [""] * len(prompts)
        decode = self._serving.tokenizer.decode
        return [decode(prompt, skip_special_tokens=request.skip_special_tokens) for prompt in prompts]

    async def _start(
        self,
        request: R,
        prompts: _Prompts,
        adapter: AdapterRef | None,
        request_id: str,
        observer: AnswerObserver,
        cost: int,
    ) -> Answer:
        """Starts the choices of `request`. Raises InvalidRequestError if it exceeds the targets' limits."""
        limits = self._serving.pool.limits()

        def prepare() -> tuple[AnswerForm, Reply, list[ChoiceRequest]]:
            form = self._answer_form(request, prompts.token_ids[0])
            reply = self._new_reply(request, form.reader, request_id, adapter, limits.fingerprint)
            return form, reply, self._choice_requests(request, form, reply, prompts, adapter, limits)

        form, reply, choices = await run_in_thread_if_large(cost, prepare)
        if self._serving.traffic is not None:
            self._serving.traffic.add(prompts.token_ids)
        prompt_lens = [len(prompt) for prompt in prompts.token_ids]
        observer.begin(request, reply, self._serving.model_id, adapter, prompt_lens, form.reader)
        text_format, window = self._text_format(request, form, limits), StartWindow()
        sequences = [
            generate(
                self._serving.pool,
                choice,
                ChoiceWriter(text_format, prompts.echoes[index // request.n]),
                ChoiceObserver(observer, choice, counts_prompt=index % request.n == 0),
                window,
                self._serving.max_pause_seconds,
            )
            for index, choice in enumerate(choices)
        ]
        return Answer(reply, interleave(sequences), len(sequences), prompt_lens)

    def _new_reply(
        self, request: R, reader: Reader | None, request_id: str, adapter: AdapterRef | None, fingerprint: str
    ) -> Reply:
        serving = self._serving
        return self._reply(
            request,
            reader,
            id=f"{self.reply_type.id_prefix}{request_id}",
            created=int(time.time()),
            model=serving.model_id if adapter is None else adapter.name,
            seed=draw_seed() if request.seed is None else request.seed,
            has_token_ids=request.return_token_ids,
            has_rounds=request.return_rounds,
            has_speculation_stats=request.return_speculation_stats,
            include_usage=request.include_usage,
            continuous_usage=request.continuous_usage,
            logprobs=LogprobsFormat(serving.tokenizer, request.return_tokens_as_token_ids),
            has_echo=request.has_echo,
            num_logprobs=request.num_logprobs or 0,
            num_prompt_logprobs=request.prompt_logprobs,
            system_fingerprint=fingerprint,
        )

    def _choice_requests(
        self,
        request: R,
        form: AnswerForm,
        reply: Reply,
        prompts: _Prompts,
        adapter: AdapterRef | None,
        limits: Limits,
    ) -> list[ChoiceRequest]:
        return build_choice_requests(
            request,
            request_id=reply.id,
            prompts=prompts.token_ids,
            routing_keys=prompts.routing_keys,
            cache_salt=prompts.cache_salt,
            owner=prompts.owner,
            output_token_ms=prompts.output_token_ms,
            seed=reply.seed,
            limits=limits,
            tokenizer=self._serving.tokenizer,
            grammar=form.grammar,
            turn_end_ids=form.turn_end_ids,
            adapter=adapter,
            may_speculate=self._serving.switch.draw(),
        )

    def _text_format(self, request: R, form: AnswerForm, limits: Limits) -> TextFormat:
        stop_token_ids = frozenset(request.stop_token_ids)
        end_token_ids = stop_token_ids | form.turn_end_ids | limits.eos_token_ids
        return TextFormat(
            self._serving.tokenizer,
            request.stop_strings,
            request.skip_special_tokens,
            frozenset() if request.include_stop_str_in_output else end_token_ids,
            stop_token_ids,
            request.min_tokens,
            has_no_tokens=request.token_limit[1] == 0,
            shown_special_tokens=form.shown_special_tokens,
            has_rounds=request.return_rounds,
            reader=form.reader,
        )


def draw_seed() -> int:
    """Returns a random seed of 53 bits: JavaScript clients cannot represent larger integers exactly."""
    return secrets.randbits(53)
