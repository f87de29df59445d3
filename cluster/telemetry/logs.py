"""Logging of the programs: one line an event on stderr, with the program's name."""

from __future__ import annotations

import logging


def setup_logging(program: str, level: int = logging.INFO) -> None:
    """Sends the log of this process to stderr as `time level program: message`."""
    logging.basicConfig(
        level=level,
        format=f"%(asctime)s %(levelname)s {program}: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    # Libraries' own news is of no use to an operator.
    for name in ("httpx", "grpc", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("torchao").setLevel(logging.ERROR)  # warns of kernels for other machines
