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
    """Settings of the plugin. An unknown key is an error. Drafts are chains, because vLLM verifies no trees."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    draft_addresses: tuple[Address, ...] = Field(
        description="addresses of the draft workers: host:port, dns:name:port or file:path; none: coupled sampling "
        "alone"
    )
    speculation: SpeculationConfig = Field(
        SpeculationConfig(), description="the same settings as in a cluster's configuration"
    )
    metrics_host: str = Field("127.0.0.1", description="address on which the metrics page listens")
    metrics_port: Port | None = Field(
        None, description="its port, plus the engine's index with data parallelism; 0: a free one; null: no page"
    )
    metrics_token_file: FilePath | None = Field(None, description="token for the page; null: that of `tls`, if set")
    allow_untested_vllm: bool = Field(
        False, description="run even if an untested version of vLLM differs in internals that the plugin uses"
    )
    tls: TlsConfig = Field(TlsConfig(), description="certificates and token for draft workers, as in a cluster")
    draft_server_name: str | None = Field(
        None, description="name in the draft workers' certificates; null: the dialled host"
    )

    @field_validator("speculation")
    @classmethod
    def _as_vllm_can(cls, speculation: SpeculationConfig) -> SpeculationConfig:
        for key, value, possible in (
            ("acceptance", speculation.acceptance, ("coupled", "greedy")),
            ("tree_width", speculation.tree_width, (1,)),
        ):
            if value not in possible:
                raise ValueError(f"{key} {value} is not possible inside vLLM: leave it out")
        return speculation

    @property
    def max_drafts(self) -> int:
        """Maximum number of drafts of a request in a step; 0 without draft workers."""
        speculation = self.speculation
        has_drafts = bool(self.draft_addresses) and speculation.num_speculative_tokens > 0
        return speculation.max_speculative_tokens if has_drafts else 0

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
