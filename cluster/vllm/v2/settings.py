"""Settings of the plugin: the section `outrider` of vLLM's `--additional-config`.

{"outrider": {"draft_addresses": ["draft-0:7000", "dns:drafts:7000"], "speculation": {"num_speculative_tokens": 5}}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from cluster.config.speculation import SpeculationConfig
from cluster.config.tls import TlsConfig
from cluster.config.types import Address, FilePath, Port
from cluster.errors import ConfigurationError

SECTION = "outrider"


class PluginSettings(BaseModel):
    """Settings of the plugin. An unknown key is an error.

    vLLM verifies the same number of drafts in every step. So `controller` must be "fixed", and
    `max_speculative_tokens` must equal `num_speculative_tokens`. Drafts are chains.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    draft_addresses: tuple[Address, ...] = Field(
        description="addresses of the draft workers: host:port, dns:name:port or file:path; none: coupled sampling "
        "alone"
    )
    speculation: SpeculationConfig = Field(
        default_factory=lambda: _speculation({}), description="the same as in a cluster"
    )
    metrics_host: str = Field("127.0.0.1", description="address on which the metrics page listens")
    metrics_port: Port | None = Field(None, description="its port; 0: a free one; null: no page")
    metrics_token_file: FilePath | None = Field(None, description="token for the page; null: that of `tls`, if set")
    tls: TlsConfig = Field(TlsConfig(), description="certificates and token for draft workers, as in a cluster")
    draft_server_name: str | None = Field(
        None, description="name in the draft workers' certificates; null: the dialled host"
    )

    @field_validator("speculation", mode="before")
    @classmethod
    def _with_defaults(cls, given: Any) -> Any:
        return _speculation(given) if isinstance(given, Mapping) else given

    @field_validator("speculation", mode="after")
    @classmethod
    def _as_vllm_can(cls, speculation: SpeculationConfig) -> SpeculationConfig:
        most = speculation.num_speculative_tokens
        for key, value, possible in (
            ("controller", speculation.controller, ("fixed",)),
            ("acceptance", speculation.acceptance, ("coupled", "greedy")),
            ("tree_width", speculation.tree_width, (1,)),
            ("max_speculative_tokens", speculation.max_speculative_tokens, (most,)),
        ):
            if value not in possible:
                raise ValueError(f"{key} {value} is not possible inside vLLM: leave it out")
        return speculation

    @property
    def num_speculative_tokens(self) -> int:
        """Number of drafts in each step; 0 if no drafter is configured."""
        return self.speculation.num_speculative_tokens if self.draft_addresses else 0

    @classmethod
    def of(cls, additional_config: Mapping[str, Any]) -> PluginSettings:
        """Reads the settings. Raises ConfigurationError, with the name of the key, if a setting is invalid."""
        try:
            return cls.model_validate(additional_config[SECTION])
        except ValidationError as error:
            complaint = error.errors()[0]
            key = ".".join([SECTION, *(str(part) for part in complaint["loc"])])
            raise ConfigurationError(
                f"--additional-config: {key}: {complaint['msg']} (got {complaint['input']!r})"
            ) from error


def _speculation(given: Mapping[str, Any]) -> SpeculationConfig:
    """Returns the speculation settings `given`, with the defaults of the plugin instead of those of a cluster."""
    k = given.get("num_speculative_tokens", SpeculationConfig().num_speculative_tokens)
    return SpeculationConfig.model_validate({"controller": "fixed", "max_speculative_tokens": k, **given})
