"""llama.cpp's server as a system to compare with, which people use without a GPU. `bench.peers` starts it.

Its source is part of a package on PyPI. To build it in FOLDER (20 minutes on 2 cores):

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36 && tar xzf llama_cpp_python-*.tar.gz
    cmake -S llama_cpp_python-*/vendor/llama.cpp -B FOLDER -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \\
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_OPENSSL=OFF
    ninja -C FOLDER llama-server

`python -m bench.llama_cpp PROGRAM [ARGUMENT ...]` runs a program in its place, as `Child` starts Python's modules only.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from services.launch.child import Child

# The name of a pre-tokenizer is of no effect, as prompts are token IDs; without a known one the converter gives up.
_CONVERT = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "llama-bpe"
sys.argv = sys.argv[1:]
sys.argv[0] += "/convert_hf_to_gguf.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def convert(build: Path, model: Path, file_type: str) -> Path:
    """Writes `model` as a GGUF file of `file_type` (bf16, f16, q8_0, f32) into its folder, and returns the file."""
    file = model / f"{file_type}.gguf"
    if not file.exists():
        cache = (build / "CMakeCache.txt").read_text(encoding="utf-8")
        [source] = re.findall(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.+)$", cache, re.MULTILINE)
        command = [sys.executable, "-c", _CONVERT, source, "--outtype", file_type, "--outfile", file, model]
        subprocess.run(command, check=True, capture_output=True)
    return file


def llama_server(
    name: str,
    build: Path,
    target: Path,
    draft: Path | None,
    port: int,
    *,
    num_speculative_tokens: int,
    max_model_len: int,
    max_num_seqs: int,
) -> Child:
    """Returns a server of GGUF files on 127.0.0.1 that draws from the whole distribution, as the other systems do."""
    threads = str(len(os.sched_getaffinity(0)))
    drafting = ["-md", str(draft), "--spec-type", "draft-simple", "--spec-draft-n-max", str(num_speculative_tokens)]
    arguments = [
        *(str(build / "bin" / "llama-server"), "-m", str(target), *(drafting if draft is not None else ())),
        *("--threads", threads, "--threads-batch", threads, "--parallel", str(max_num_seqs), "--cont-batching"),
        *("--ctx-size", str(max_num_seqs * max_model_len), "--samplers", "temperature", "--no-ui", "--offline"),
        *("--no-cache-prompt", "--metrics", "--log-disable", "--host", "127.0.0.1", "--port", str(port)),
    ]
    return Child(name, arguments, module="bench.llama_cpp")


if __name__ == "__main__":
    os.execv(sys.argv[1], sys.argv[1:])
