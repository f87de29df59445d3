"""Prints what vLLM makes of configurations, with the plugin in the process.

It writes one line of JSON for each line of JSON that it reads. A line has engine arguments and, under `runner`, the
value of VLLM_USE_V2_MODEL_RUNNER.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    from vllm.engine.arg_utils import EngineArgs

    from cluster.vllm_plugin.registration import register

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        arguments = json.loads(line)
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = arguments.pop("runner", "1")
        register()  # as often as one likes
        try:
            config = EngineArgs(**arguments).create_engine_config()
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        else:
            speculative = config.speculative_config
            answer = {
                "processors": config.model_config.logits_processors,
                "k": speculative and speculative.num_speculative_tokens,
                "scheduler": config.scheduler_config.scheduler_cls,
            }
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
