"""The section `router`: the HTTP server."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from cluster.config.types import DrainSeconds, FilePath, HostPort, Port, PositiveSeconds, Section, is_loopback


class RouterConfig(Section):
    host: str = Field("127.0.0.1", description="address to listen at; 0.0.0.0: all of the machine's")
    port: Port = Field(8000, description="port to listen at; 0: a free one")
    max_waiting_requests: PositiveInt = Field(1024, description="requests in flight before new ones are answered 503")
    max_waiting_tokens: PositiveInt = Field(
        2**23,
        description="prompt tokens of the requests in flight, each prompt once, before new ones are answered 503; a "
        "request that has more by itself is a 400",
    )
    max_body_bytes: PositiveInt = Field(8 * 2**20, description="bytes of a request's body before it is answered 413")
    max_bodies_bytes: PositiveInt = Field(
        512 * 2**20,
        description="bytes of the bodies of all requests at once, beyond the first 64 KiB of each, before more is "
        "answered 503",
    )
    max_connections: PositiveInt = Field(4096, description="connections at once before more are closed")
    max_connections_per_address: PositiveInt | None = Field(
        None,
        description="the same of one client's address (IPv6: of its /64), which a proxy's is for all behind it; null: "
        "half of `max_connections`",
    )
    header_timeout_seconds: PositiveSeconds = Field(
        10.0, description="how long a new connection may take for its TLS handshake, and a request for its headers"
    )
    body_timeout_seconds: PositiveSeconds = Field(60.0, description="how long a request may take for its body")
    idle_timeout_seconds: PositiveSeconds = Field(
        120.0,
        description="how long a connection stays open between requests; longer than clients and proxies keep theirs "
        "(5 s are usual, nginx has 60 s, Go's clients 90 s), as one that asks just then finds it closed",
    )
    write_timeout_seconds: PositiveSeconds = Field(
        30.0,
        description="how long a client may read nothing of an answer that is ready for it (less than 64 KiB of a long "
        "one) before its connection is closed and its request ended",
    )
    drain_seconds: DrainSeconds = Field(
        30.0, description="how long running requests may go on after SIGTERM; then they end with an error (503)"
    )
    max_pause_seconds: Annotated[float, Field(ge=0)] = Field(
        60.0, description="how long a request whose target was lost waits for another, or for its restart"
    )
    served_model_name: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="what clients call the model; null: `target.model`, or its folder's name where it is a path"
    )
    tool_call_parser: Literal["auto", "hermes", "llama3", "mistral", "qwen", "qwen3_xml", "none"] = Field(
        "auto", description="how the model writes calls of tools; auto: as its chat template says; none: calls are text"
    )
    reasoning_parser: Literal["auto", "think", "none"] = Field(
        "auto",
        description="how the model writes its reasoning; think: between `<think>` and `</think>`; auto: so where its "
        "chat template has these; none: reasoning is text",
    )
    speculation_percentage: Annotated[float, Field(ge=0, le=100)] = Field(
        100.0, description="share of the requests that are speculated for, at first; `outrider speculation` changes it"
    )
    admin_listen: HostPort | None = Field(
        None,
        description="where the router answers `outrider speculation` and other calls of its operators, and shows its "
        "metrics; without keys it asks nobody who they are, so keep it on 127.0.0.1 then; null: nowhere",
    )
    api_keys_file: FilePath | None = Field(
        None,
        description="keys of clients, one `name:key` or `name:sha256:hex` a line; with it nobody is answered without "
        "one, but probes. A file that changes is read again. null: no key is asked for",
    )
    admin_keys_file: FilePath | None = Field(
        None, description="keys of those who may call `admin_listen`, likewise; null: those of `api_keys_file`"
    )
    metrics_token_file: FilePath | None = Field(
        None,
        description="a token that opens `/metrics` and nothing else, for who scrapes it; each line of the file is one. "
        "null: where there are keys, a key is asked for",
    )
    requests_per_minute_per_key: PositiveInt | None = Field(
        None, description="requests that a key may begin in any minute before it is answered 429; null: no limit"
    )
    max_requests_per_key: PositiveInt | None = Field(
        None, description="requests that a key may have running before it is answered 429; null: no limit"
    )
    tls_certificate_file: FilePath | None = Field(
        None,
        description="certificate (PEM) of the router, and those between it and its CA's: it then answers over HTTPS "
        "only. A file that changes is read again",
    )
    tls_key_file: FilePath | None = Field(None, description="its private key (PEM)")
    traffic_log_file: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="file to append prompts to, as token IDs, one a line, for `outrider distill`: its readers see "
        "what was asked; null: none",
    )
    traffic_log_max_bytes: PositiveInt = Field(2**30, description="size of that file from which on nothing is added")
    cors_allow_origins: tuple[Annotated[str, Field(pattern=r"^(\*|https?://[^\s/]+)$")], ...] = Field(
        (),
        description="web pages that may call the router from a browser: origins such as `https://chat.example`, or `*`",
    )
    page: bool | None = Field(
        None,
        description="show the cluster at work to browsers, at `/`: counts of everybody's rounds, and no text but the "
        "page's own; null: where `host` is this machine's alone",
    )
    page_question: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="what the page's prompt begins with, put as a question to a model that converses; null: the "
        "beginning of a Python function, to be completed",
    )
    allow_different_targets: bool = Field(
        False,
        description="use targets together whose answers may differ (other weights, dtype, processor, ...); what it "
        "costs: a request may get other tokens from another worker, and one that is moved may change its course",
    )

    @model_validator(mode="after")
    def _certificate_with_key(self) -> RouterConfig:
        if (self.tls_certificate_file is None) != (self.tls_key_file is None):
            raise ValueError("HTTPS needs both: set tls_certificate_file and tls_key_file")
        return self

    @property
    def has_page(self) -> bool:
        return is_loopback(self.host) if self.page is None else self.page

    @property
    def scheme(self) -> str:
        return "http" if self.tls_certificate_file is None else "https"
