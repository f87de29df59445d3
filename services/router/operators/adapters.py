"""Operators' calls for LoRA adapters: list them by target, load or unload one on all targets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from cluster.config.types import AdapterName
from cluster.errors import InvalidRequestError, NotFoundError, OutriderError, UnavailableError
from services.router.access.caller import name_of_caller
from services.router.errors import invalid_request
from services.router.http.body import read_admin_call
from services.router.targets.replicas import Replica, ReplicaPool

audit = logging.getLogger("outrider.audit")

_PATH = "/admin/adapters"
_Reason = Annotated[str, Field(max_length=500)]
_Folder = Annotated[str, Field(min_length=1, max_length=4096)]


class _Load(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    name: AdapterName
    path: _Folder
    replace: bool = False
    reason: _Reason = ""


class _Unload(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    name: AdapterName
    reason: _Reason = ""


class _LoadAsVllm(BaseModel):
    model_config = ConfigDict(strict=True)

    lora_name: AdapterName
    lora_path: _Folder
    load_inplace: bool = False


class _UnloadAsVllm(BaseModel):
    model_config = ConfigDict(strict=True)

    lora_name: AdapterName


_B = TypeVar("_B", bound=BaseModel)


class AdapterCalls:
    """Loads and unloads adapters on all targets at once.

    Each target loads an adapter from its own disk. Other routers see the change when they poll the targets.
    """

    def __init__(self, pool: ReplicaPool, model_id: str) -> None:
        """`model_id`: name of the base model, which no adapter may have."""
        self._pool = pool
        self._model_id = model_id

    def routes(self) -> list[Route]:
        return [
            Route(_PATH, self._list, methods=["GET"]),
            Route(_PATH, self._load, methods=["POST"]),
            Route(_PATH + "/{name:path}", self._unload, methods=["DELETE"]),
            # The same as vLLM's, so that its scripts keep working.
            Route("/v1/load_lora_adapter", self._load_as_vllm, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self._unload_as_vllm, methods=["POST"]),
        ]

    async def _list(self, _: Request) -> Response:
        held: dict[tuple[str, str], list[str]] = {}
        for replica in self._pool.replicas:
            for item in (replica.adapters or {}).items():
                held.setdefault(item, []).append(replica.address)
        return JSONResponse(
            {
                "adapters": [
                    {"name": name, "fingerprint": fingerprint, "targets": targets}
                    for (name, fingerprint), targets in sorted(held.items())
                ]
            }
        )

    async def _load(self, request: Request) -> Response:
        asked = await _read(_Load, request)
        return JSONResponse(await self.load(asked.name, asked.path, asked.replace, _why(request, asked.reason)))

    async def _unload(self, request: Request) -> Response:
        asked = _checked(_Unload, {**request.query_params, "name": request.path_params["name"]})
        return JSONResponse(await self.unload(asked.name, _why(request, asked.reason)))

    async def _load_as_vllm(self, request: Request) -> Response:
        asked = await _read(_LoadAsVllm, request)
        done = await self.load(asked.lora_name, asked.lora_path, asked.load_inplace, _why(request))
        return _as_vllm(done, f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    async def _unload_as_vllm(self, request: Request) -> Response:
        asked = await _read(_UnloadAsVllm, request)
        done = await self.unload(asked.lora_name, _why(request))
        return _as_vllm(done, f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")

    async def load(self, name: str, path: str, replace: bool, why: str) -> dict[str, Any]:
        """Loads an adapter on all targets. Returns the outcome for each of them.

        Raises InvalidRequestError if `name` is the model's own, and OutriderError if all targets failed.
        """
        if name == self._model_id:
            raise InvalidRequestError(f"{name!r} is the name of the model itself: choose another", param="name")

        async def load(replica: Replica) -> dict[str, Any]:
            return {"fingerprint": await replica.load_adapter(name, path, replace=replace)}

        audit.warning("audit: adapter %r is to be loaded from %r; %s", name, path, why)
        return {"name": name, "targets": await self._ask_all(load)}

    async def unload(self, name: str, why: str) -> dict[str, Any]:
        """Unloads an adapter from all targets. Returns the outcome for each of them.

        Raises OutriderError if all targets failed.
        """

        async def unload(replica: Replica) -> dict[str, Any]:
            return {"num_running": await replica.unload_adapter(name)}

        audit.warning("audit: adapter %r is to be unloaded; %s", name, why)
        return {"name": name, "targets": await self._ask_all(unload)}

    async def _ask_all(self, ask: Callable[[Replica], Awaitable[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Returns each target's answer, with `error` if it failed.

        Raises UnavailableError if there are no targets, and the most important error if all failed.
        """
        replicas = self._pool.replicas
        if not replicas:
            raise UnavailableError("no target is listed now; see /health")
        answers = await asyncio.gather(*(ask(replica) for replica in replicas), return_exceptions=True)
        await asyncio.gather(*(replica.poll() for replica in replicas))  # lists the new adapters immediately
        errors: list[tuple[Replica, OutriderError]] = []
        rows: list[dict[str, Any]] = []
        for replica, answer in zip(replicas, answers, strict=True):
            if isinstance(answer, OutriderError):
                errors.append((replica, answer))
                rows.append({"address": replica.address, "error": answer.message})
            elif isinstance(answer, BaseException):
                raise answer
            else:
                rows.append({"address": replica.address, **answer})
        if len(errors) == len(replicas):
            # A refusal is more important than a target that does not have the adapter or does not answer.
            replica, error = min(errors, key=lambda item: isinstance(item[1], NotFoundError | UnavailableError))
            raise type(error)(f"target {replica.address}: {error.message}")
        return rows


async def _read(kind: type[_B], request: Request) -> _B:
    return _checked(kind, await read_admin_call(request))


def _checked(kind: type[_B], fields: dict[str, Any]) -> _B:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise invalid_request(error) from error


def _why(request: Request, reason: str = "") -> str:
    return f"asked by {name_of_caller(request.scope)}, reason: {reason!r}"


def _as_vllm(done: dict[str, Any], success: str) -> Response:
    """Returns vLLM's answer with the text `success`.

    Raises UnavailableError if any target failed, so that scripts that only check the status notice it.
    """
    errors = [f"{target['address']}: {target['error']}" for target in done["targets"] if "error" in target]
    if errors:
        raise UnavailableError("; ".join(errors))
    return PlainTextResponse(success)
