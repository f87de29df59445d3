"""The program of `engine.Engine`: a line of JSON in, a line of JSON out; all else that is printed goes to stderr."""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from PIL import Image
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    llm = LLM(**json.loads(sys.stdin.readline()))

    def prompt(case: dict[str, Any]) -> Any:
        """The tokens, with a picture of random pixels if the field `picture` has their seed."""
        found: dict[str, Any] = {"prompt_token_ids": case["prompt"]}
        if (seed := case["fields"].pop("picture", None)) is not None:
            found["multi_modal_data"] = {
                "image": Image.frombytes("RGB", (28, 28), random.Random(seed).randbytes(3 * 28**2))
            }
        return found

    def params(case: dict[str, Any]) -> SamplingParams:
        fields = dict(case["fields"])
        if "regex" in fields:
            fields["structured_outputs"] = StructuredOutputsParams(regex=fields.pop("regex"))
        if "logit_bias" in fields:
            fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
        return SamplingParams(seed=case["seed"], max_tokens=case["max_tokens"], **fields)

    def generate(cases: list[dict[str, Any]]) -> list[list[list[int]]]:
        prompts = [prompt(case) for case in cases]
        outputs = llm.generate(prompts, [params(case) for case in cases], use_tqdm=False)
        return [[list(choice.token_ids) for choice in output.outputs] for output in outputs]

    def counters() -> dict[str, float]:
        return {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}

    for line in sys.stdin:
        command = json.loads(line)
        answer = counters() if command == "counters" else generate(command)
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # some of vLLM's threads would not end


if __name__ == "__main__":
    main()
