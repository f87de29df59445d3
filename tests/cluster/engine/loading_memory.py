"""How much memory a process takes to load a model: `python -m tests.cluster.engine.loading_memory FOLDER FORM`."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import torch

from cluster.engine.cpu_model import CpuModel
from cluster.engine.loader import load_model
from cluster.engine.model import Model, TorchModel

CPU = torch.device("cpu")


def anonymous_bytes() -> int:
    """This process's memory without mapped files."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def main(folder: Path, form_name: str) -> None:
    form: type[Model] = CpuModel if form_name == "kernels" else TorchModel
    peak, is_over = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_over.wait(0.0005):
            peak = max(peak, anonymous_bytes())

    before = anonymous_bytes()
    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load_model(folder, torch.float32, CPU, form=form)
    after = anonymous_bytes()
    is_over.set()
    watcher.join()
    del model
    print(json.dumps({"peak": max(peak, after) - before, "after": after - before}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
