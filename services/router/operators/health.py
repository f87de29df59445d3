"""Health of the router and of its targets. Only operators see where the targets are."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.router.access.caller import caller_of
from services.router.targets.replicas import Replica, ReplicaPool


class Health:
    """`GET /health` at both of the router's addresses."""

    def __init__(self, pool: ReplicaPool, model_id: str) -> None:
        self._pool = pool
        self._model_id = model_id
        self.is_draining = False  # whether the router will soon close its port

    @property
    def is_ready(self) -> bool:
        """True if probes should find that requests are answered here."""
        return bool(self._pool.usable) and not self.is_draining

    async def public(self, request: Request) -> Response:
        """Answers at the public address; a probe without a key gets only the status."""
        caller = caller_of(request.scope)
        if caller is None:
            return self._answer({})
        return self._answer(self._targets(with_places=caller.sees_workers))

    async def admin(self, _: Request) -> Response:
        return self._answer(self._targets(with_places=True))

    def _answer(self, more: dict[str, Any]) -> Response:
        pool = self._pool
        status, code = ("ok", 200) if self.is_ready else ("draining" if self.is_draining else "unavailable", 503)
        headers = {} if self.is_ready else {"retry-after": str(pool.retry_after)}
        return JSONResponse({"status": status} | more, status_code=code, headers=headers)

    def _targets(self, *, with_places: bool) -> dict[str, Any]:
        replicas = self._pool.replicas
        targets = [_describe(replica) if with_places else _outline(_describe(replica)) for replica in replicas]
        body = {"model": self._model_id, "targets": targets}
        if not self._pool.usable and with_places:
            body["reason"] = "; ".join(f"target {replica.address}: {replica.problem}" for replica in replicas)
        elif not self._pool.usable:
            body["reason"] = self._pool.outline()
        return body


def _describe(replica: Replica) -> dict[str, Any]:
    """Returns the entry of `replica` with all details, for operators."""
    entry: dict[str, Any] = {"address": replica.address, "status": replica.status, "problem": replica.problem}
    description = replica.description
    if description is not None:
        entry |= {
            "advertised_address": description.advertised_address or None,
            "wire_version": description.wire_version,
            "model": description.model.name,
            "adapters": sorted(description.adapters),
            "num_draft_links": description.num_draft_links,
            "num_draft_links_configured": description.num_draft_links_configured,
            "running": description.load.num_running,
            "waiting": description.load.num_waiting,
        }
    return entry


def _outline(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns `entry` without addresses.

    The status replaces the problem, whose text may contain an address.
    """
    outline = {name: value for name, value in entry.items() if name not in ("address", "advertised_address")}
    return outline | {"problem": None if entry["problem"] is None else entry["status"]}
