"""Description of the machine that a result was measured on."""

from __future__ import annotations

import os
import platform

from services.prove.devices import processor


def describe_machine() -> dict[str, str | int]:
    return {"processor": processor(), "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
