"""Types of the configuration's sections."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Port = Annotated[int, Field(ge=0, le=65535)]
Share = Annotated[float, Field(ge=0, le=1)]
HOST_PORT = r"([^\s:]+|\[[0-9a-fA-F:]+\]):\d{1,5}"
HostPort = Annotated[str, Field(pattern=rf"^{HOST_PORT}$")]
# One worker, every address of a DNS name, or the addresses in a file: `cluster.placement.endpoints`.
Address = Annotated[str, Field(pattern=rf"^({HOST_PORT}|dns:[^\s:]+:\d{{1,5}}|file:\S.*)$")]

FilePath = Annotated[str, Field(min_length=1)]

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

_ADAPTER_NAME = r"[A-Za-z0-9][A-Za-z0-9._:@/-]{0,127}"
AdapterName = Annotated[str, Field(pattern=rf"^{_ADAPTER_NAME}$")]
"""What requests call a LoRA adapter: it stands in URLs, logs and labels of metrics."""


def is_adapter_name(name: str) -> bool:
    return re.fullmatch(_ADAPTER_NAME, name) is not None


def is_host_port(address: str) -> bool:
    """Returns True if `address` is a host and a port."""
    return re.fullmatch(HOST_PORT, address) is not None


def is_loopback(host: str) -> bool:
    """Returns True if only programs on this machine can connect to a listener at `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


DrainSeconds = Annotated[float, Field(ge=0)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
