"""Access to the router: once keys are configured, requests need one by default.

| who | comes with | may |
| --- | --- | --- |
| client | a key of `router.api_keys_file` | all of the public address, within the limits of its name |
| operator | a key of `router.admin_keys_file`; if not set, of the file above (a warning) | all of the admin address |
| scraper | the token in `router.metrics_token_file` | GET /metrics, at both |
| launcher | a key that it made for itself; the router has its hash | GET /health and /metrics |
| anybody | nothing | probes: is the router alive, can it serve; the files of the page |

A request is refused before its body is read. The answer gives the reason, and the audit log gets a line.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Mapping
from functools import partial

from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.config.router import RouterConfig
from cluster.config.types import is_loopback
from cluster.errors import ConfigurationError, OutriderError
from cluster.transport.token_file import TokenFile
from services.http_call import LAUNCHER_KEY_SHA256
from services.router.access.api_keys import ApiKeys
from services.router.access.caller import Caller, host_of
from services.router.access.key_limits import KeyLimits
from services.router.access.local_sites import LocalSites
from services.router.errors import InvalidApiKeyError, error_response, excerpt
from services.router.http.current_key import current_key
from services.router.http.loop_turns import LoopTurns
from services.router.http.middleware import route_of
from services.router.http.streaming import NotedSend
from services.router.metrics import RouterMetrics

audit = logging.getLogger("outrider.audit")

PROBES = frozenset({"/health/live", "/health", "/ping"})
_METRICS = "/metrics"
_OF_LAUNCHERS = frozenset({"/health", _METRICS})
_SEND_ONE = "send a key as `Authorization: Bearer KEY` or as `x-api-key: KEY`"


class Credentials:
    """All credentials of one router."""

    def __init__(
        self,
        clients: ApiKeys | None = None,
        operators: ApiKeys | None = None,
        metrics_token: TokenFile | None = None,
        launcher_digest: bytes | None = None,
        *,
        public_sites: LocalSites | None = None,
        admin_sites: LocalSites | None = None,
    ) -> None:
        """`public_sites`, `admin_sites`: not None if only this machine reaches the address, and it needs no key.

        Callers of the public address may then see the workers' addresses, unless operators have keys.
        """
        self.public_sites = public_sites
        self.admin_sites = admin_sites
        self._clients = clients
        self._own_operators = operators
        self._open = Caller("", "client", sees_workers=public_sites is not None and operators is None)
        self._operators = operators or clients
        self._metrics_token = metrics_token
        self._launcher_digest = launcher_digest

    @classmethod
    def of(cls, config: RouterConfig, environment: Mapping[str, str]) -> Credentials:
        """Reads the credentials. Raises ConfigurationError if a file is missing or broken."""
        clients, operators, token = config.api_keys_file, config.admin_keys_file, config.metrics_token_file
        digest = environment.get(LAUNCHER_KEY_SHA256)
        try:
            launcher_digest = None if digest is None else bytes.fromhex(digest)
        except ValueError as error:
            raise ConfigurationError(f"{LAUNCHER_KEY_SHA256} in the environment is not hexadecimal") from error
        hosts = {name.lower() for name in config.allowed_hosts}
        admin_host = (config.admin_listen or "").rpartition(":")[0]
        return cls(
            None if clients is None else ApiKeys(clients, "router.api_keys_file"),
            None if operators is None else ApiKeys(operators, "router.admin_keys_file"),
            None if token is None else TokenFile(token, "router.metrics_token_file"),
            launcher_digest,
            public_sites=LocalSites(hosts, set(config.cors_allow_origins))
            if clients is None and is_loopback(config.host)
            else None,
            admin_sites=LocalSites(hosts, set())
            if (operators or clients) is None and is_loopback(admin_host)
            else None,
        )

    async def follow(self) -> None:
        """Reads files of keys that have changed, until cancelled."""
        files = {keys for keys in (self._clients, self._operators) if keys is not None}
        await asyncio.gather(*(keys.follow() for keys in files))

    def public(self, key: bytes | None, route: str) -> Caller | None:
        """Returns the caller with `key` at the public address; None: `route` is not allowed."""
        if self._clients is None:
            return self._open if route != _METRICS or self._metrics_token is None else self._scraper(key, route)
        if key is None:
            return None
        if (name := self._clients.name_of(key)) is not None:
            is_operator = self._own_operators is not None and self._own_operators.name_of(key) is not None
            attributes = self._clients.attributes_of(name)
            has_priority, limit = attributes.priority == "all", attributes.output_token_ms
            return Caller(name, "client", sees_workers=is_operator, has_priority=has_priority, output_token_ms=limit)
        return self._scraper(key, route) or self._launcher(key, route)

    def admin(self, key: bytes | None, route: str) -> Caller | None:
        """Returns the caller with `key` at the admin address; None: `route` is not allowed."""
        if self._operators is None:
            return self._open if route != _METRICS or self._metrics_token is None else self._scraper(key, route)
        if key is None:
            return None
        if (name := self._operators.name_of(key)) is not None:
            return Caller(name, "operator")
        return self._scraper(key, route)

    def _scraper(self, key: bytes | None, route: str) -> Caller | None:
        if key is None or route != _METRICS or self._metrics_token is None:
            return None
        return Caller("metrics", "scraper") if self._metrics_token.accepts(key) else None

    def _launcher(self, key: bytes, route: str) -> Caller | None:
        if self._launcher_digest is None or route not in _OF_LAUNCHERS:
            return None
        is_known = hmac.compare_digest(hashlib.sha256(key).digest(), self._launcher_digest)
        return Caller("launcher", "launcher", sees_workers=True) if is_known else None


class Gate:
    """Access control of the public address."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        credentials: Credentials,
        limits: KeyLimits,
        metrics: RouterMetrics,
        turns: LoopTurns,
        open_routes: frozenset[str] = frozenset(),
    ) -> None:
        """`open_routes`: routes that need no key, in addition to probes. `turns`: refusals wait for them, too."""
        self._app = app
        self._credentials = credentials
        self._limits = limits
        self._metrics = metrics
        self._turns = turns
        self._open_routes = PROBES | open_routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route = route_of(scope)
        try:
            key = bearer_of(scope)
            refusal = InvalidApiKeyError(_reason(key))
        except InvalidApiKeyError as error:  # does not matter without configured keys
            key, refusal = None, error
        caller = self._credentials.public(key, route)
        scope.setdefault("state", {})["caller"] = caller
        scope["state"]["ask_again"] = partial(self._credentials.public, key, route)
        if caller is None and route not in self._open_routes:
            self._metrics.keys.count_request("", refusal.http_status)
            await self._turns.take("")
            await refuse(refusal, scope, receive, send)
        elif caller is None or caller.role != "client" or not caller.name:
            await self._app(scope, receive, send)
        else:
            await self._answer(caller.name, scope, receive, send)

    async def _answer(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        noted = NotedSend(send)
        current_key.set(name)  # each request has its own task, and thus its own context
        try:
            with self._limits.entered(name):
                await self._app(scope, receive, noted)
        except OutriderError as error:  # raised by the limits: the application answers all others
            await self._turns.take(name)
            await refuse(error, scope, receive, noted, name)
        finally:
            self._metrics.keys.count_request(name, scope["state"].get("outcome", noted.status or 500))


class AdminGate:
    """Access control of the admin address, which logs every call."""

    def __init__(self, app: ASGIApp, *, credentials: Credentials) -> None:
        self._app = app
        self._credentials = credentials

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            key = bearer_of(scope)
            if (caller := self._credentials.admin(key, route_of(scope))) is None:
                raise InvalidApiKeyError(_reason(key))
        except InvalidApiKeyError as error:
            await refuse(error, scope, receive, send)
            return
        scope.setdefault("state", {})["caller"] = caller
        noted = NotedSend(send)
        try:
            await self._app(scope, receive, noted)
        finally:
            if caller.role != "scraper":  # scrapers call every few seconds and change nothing
                audit.info("audit: answered %d: %s", noted.status or 500, describe_call(scope, caller.name))


def bearer_of(scope: Scope) -> bytes | None:
    """Returns the key in the headers; None if there is none.

    Raises InvalidApiKeyError for a malformed header, and for two keys.
    """
    bearers, others = (
        [value for name, value in scope["headers"] if name == header] for header in (b"authorization", b"x-api-key")
    )
    keys = [value.strip() for value in others]
    for value in bearers:
        scheme, _, key = value.partition(b" ")
        if len(bearers) > 1 or scheme.lower() != b"bearer":
            raise InvalidApiKeyError(f"the Authorization header is invalid: {_SEND_ONE}")
        keys.append(key.strip())
    given = {key for key in keys if key}  # clients send a header without a value if their key is empty
    if len(others) > 1 or len(given) > 1:
        raise InvalidApiKeyError(f"the headers have more than one key: {_SEND_ONE}")
    return bytes(given.pop()) if given else None


async def refuse(error: OutriderError, scope: Scope, receive: Receive, send: Send, name: str = "") -> None:
    """Answers with `error` and logs an audit line, in which the caller's text is escaped."""
    audit.warning("audit: refused %d: %s: %s", error.http_status, describe_call(scope, name), error.message)
    headers = {"www-authenticate": "Bearer"} if error.http_status == 401 else {}
    await error_response(error, headers)(scope, receive, send)


def describe_call(scope: Scope, name: str) -> str:
    return f"{scope['method'][:16]} {excerpt(scope['path'])} from {host_of(scope)}, key {name or 'none'!r}"


def _reason(key: bytes | None) -> str:
    if not key:
        return f"the API key is missing: {_SEND_ONE}"
    return f"the API key does not allow this request: {_SEND_ONE} that the operator of this server gave you"
