"""The section `router`: the HTTP server."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, IPvAnyNetwork, PositiveInt, model_validator

from cluster.config.types import DrainSeconds, FilePath, HostPort, Port, PositiveSeconds, Section, is_loopback


class RouterConfig(Section):
    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0: all of the machine's")
    port: Port = Field(8000, description="port to listen on; 0: a free one")
    max_waiting_requests: PositiveInt = Field(
        1024, description="maximum number of requests in flight; further ones are answered 503"
    )
    max_waiting_tokens: PositiveInt = Field(
        2**23,
        description="maximum number of prompt tokens in flight, each prompt counted once; further requests are "
        "answered 503, and a larger single request 400",
    )
    max_body_bytes: PositiveInt = Field(
        8 * 2**20, description="maximum bytes of a request's body; a larger one is answered 413"
    )
    max_connections: PositiveInt = Field(
        4096,
        description="maximum number of connections; further ones are closed, and those of one client address (IPv6: "
        "/64) beyond half of it",
    )
    header_timeout_seconds: PositiveSeconds = Field(
        10.0, description="seconds for the TLS handshake of a new connection, and for the headers of a request"
    )
    body_timeout_seconds: PositiveSeconds = Field(60.0, description="seconds for the body of a request")
    idle_timeout_seconds: PositiveSeconds = Field(
        120.0,
        description="seconds that a connection stays open between requests; longer than clients and proxies keep "
        "theirs (usually 5 s, nginx 60 s, Go's clients 90 s), or a request may reach a connection that is just "
        "being closed",
    )
    drain_seconds: DrainSeconds = Field(
        30.0,
        description="seconds for which running requests may continue after SIGTERM; then they end with an error (503)",
    )
    max_pause_seconds: Annotated[float, Field(ge=0)] = Field(
        60.0,
        description="seconds for which a request whose target was lost waits for another target, or for its restart",
    )
    drain_notice_seconds: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="first part of `drain_seconds`, in which probes are answered 503 and requests are still served, so "
        "that a load balancer stops sending them before the port closes",
    )
    served_model_name: Annotated[
        tuple[Annotated[str, Field(pattern="^[^=]+(=[^=]+)?$")], ...],
        BeforeValidator(
            lambda value: [value] if isinstance(value, str) else value or [],
            json_schema_input_type=str | list[str] | None,
        ),
    ] = Field(
        (),
        description="names of the model in requests, the first one also in answers; `alias=name`: another name of the "
        "model or of an adapter; []: `target.model`, or its folder's name if it is a path",
    )
    chat_template: FilePath | None = Field(
        None, description="file with the chat template (Jinja); null: that of the target's model"
    )
    tool_call_parser: Literal["auto", "hermes", "llama3", "mistral", "qwen", "qwen3_xml", "none"] = Field(
        "auto",
        description="syntax in which the model writes tool calls; auto: that of its chat template; none: "
        "calls are text",
    )
    reasoning_parser: Literal["auto", "think", "none"] = Field(
        "auto",
        description="syntax in which the model writes reasoning; think: between `<think>` and `</think>`; auto: "
        "think if its chat template contains these marks; none: reasoning is text",
    )
    speculation_percentage: Annotated[float, Field(ge=0, le=100)] = Field(
        100.0, description="initial share of the requests that may speculate; `outrider speculation` changes it"
    )
    admin_listen: HostPort | None = Field(
        None,
        description="address at which the router answers `outrider speculation` and other operator calls, and shows "
        "its metrics; without keys it accepts every caller, so keep it on 127.0.0.1 then; null: disabled",
    )
    api_keys_file: FilePath | None = Field(
        None,
        description="keys of clients, one `name:key` or `name:sha256:hex` per line; all requests except probes then "
        "need one. A changed file is reloaded. null: no key is required",
    )
    admin_keys_file: FilePath | None = Field(
        None,
        description="keys of operators who may call `admin_listen`, in the same format; null: those of "
        "`api_keys_file`, which the next version will refuse",
    )
    metrics_token_file: FilePath | None = Field(
        None,
        description="token that gives access to `/metrics` only, for scrapers; each line of the file is one. null: "
        "if there are keys, a key is required",
    )
    requests_per_minute_per_key: PositiveInt | None = Field(
        None, description="requests that a key may begin per minute before it is answered 429; null: no limit"
    )
    max_requests_per_key: PositiveInt | None = Field(
        None, description="requests that a key may have running before it is answered 429; null: no limit"
    )
    tls_certificate_file: FilePath | None = Field(
        None,
        description="certificate (PEM) of the router, followed by intermediate ones: the router then answers over "
        "HTTPS only. A changed file is reloaded",
    )
    tls_key_file: FilePath | None = Field(None, description="private key (PEM) of the certificate")
    traffic_log_file: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="file to which prompts are appended as token IDs, one per line, for `outrider distill`: its "
        "readers see what clients asked; at 1 GiB logging stops; null: none",
    )
    cors_allow_origins: tuple[Annotated[str, Field(pattern=r"^(\*|null|[a-z][a-z0-9+.-]*://[^\s/]+)$")], ...] = Field(
        (),
        description="web pages that may call the router from a browser: origins such as `https://chat.example` or "
        "`app://obsidian.md`, `null` (files and sandboxed frames: any site can send it), or `*`",
    )
    allowed_hosts: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")], ...] = Field(
        (),
        description="further names, such as `host.docker.internal`, of a router without keys on a loopback address: it "
        "answers 403 to another `Host`, and to the `Origin` of another site in requests that change something",
    )
    trusted_proxies: tuple[IPvAnyNetwork, ...] = Field(
        (),
        description="addresses or networks of proxies whose `X-Forwarded-For` and `X-Forwarded-Proto` are believed",
    )
    page: bool | None = Field(
        None,
        description="show browsers a page of the running cluster, at `/`: counts of all rounds, and no text but the "
        "page's own; null: only if `host` is an address of this machine alone",
    )
    routing: Literal["affinity", "least-loaded"] = Field(
        "affinity",
        description="choice of a request's target; affinity: the one where it makes the least work, which counts the "
        "prompt's beginning if it is probably in the prefix cache; least-loaded: the one with the fewest sequences",
    )
    cache_salt: Literal["none", "key"] = Field(
        "none",
        description="whose prompts share a prefix cache; none: those of all clients, unless a request has a "
        "`cache_salt`; key: those of one key of `api_keys_file`, so that no client learns from times what others asked",
    )
    allow_different_targets: bool = Field(
        False,
        description="use targets together even if their answers may differ (other weights, dtype, processor, ...): "
        "another worker may then give a request other tokens, and a moved request may change its course",
    )

    @model_validator(mode="after")
    def _certificate_with_key(self) -> RouterConfig:
        if (self.tls_certificate_file is None) != (self.tls_key_file is None):
            raise ValueError("HTTPS needs both: set tls_certificate_file and tls_key_file")
        return self

    @model_validator(mode="after")
    def _notice_within_drain(self) -> RouterConfig:
        if self.drain_notice_seconds > self.drain_seconds:
            raise ValueError(
                f"drain_notice_seconds {self.drain_notice_seconds:g} is a part of drain_seconds: raise the latter, "
                f"{self.drain_seconds:g}"
            )
        return self

    @model_validator(mode="after")
    def _salt_with_keys(self) -> RouterConfig:
        if self.cache_salt == "key" and self.api_keys_file is None:
            raise ValueError("router.cache_salt key parts the keys' prefix caches: set router.api_keys_file")
        return self

    @property
    def has_page(self) -> bool:
        return is_loopback(self.host) if self.page is None else self.page

    @property
    def scheme(self) -> str:
        return "http" if self.tls_certificate_file is None else "https"
