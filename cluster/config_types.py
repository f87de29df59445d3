"""What sections of the configuration are made of."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Port = Annotated[int, Field(ge=0, le=65535)]
Share = Annotated[float, Field(ge=0, le=1)]
HOST_PORT = r"([^\s:]+|\[[0-9a-fA-F:]+\]):\d{1,5}"
HostPort = Annotated[str, Field(pattern=rf"^{HOST_PORT}$")]
# One worker, all that a name stands for, or those that a file lists: `cluster.placement.endpoints`.
Address = Annotated[str, Field(pattern=rf"^({HOST_PORT}|dns:[^\s:]+:\d{{1,5}}|file:\S.*)$")]


def is_host_port(address: str) -> bool:
    """Whether `address` is that of one worker."""
    return re.fullmatch(HOST_PORT, address) is not None


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


DrainSeconds = Annotated[float, Field(ge=0)]
NotNegative = Annotated[float, Field(ge=0)]
