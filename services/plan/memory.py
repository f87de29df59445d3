"""The command `outrider plan memory`."""

from __future__ import annotations

import argparse

from cluster.engine.memory_plan import SELF_DRAFTER, Memory, PlannedModel, describe, plan_pair
from cluster.errors import ConfigurationError
from services.argument_types import above_zero


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "A MODEL is a size (1B, 1.5B, 7B, 8B, 13B, 70B), a size with its layers, KV heads and head size "
        "(34B/48x8x128), a folder or a bundled model; its DTYPE fp32, fp16 (default), bf16, int8 or int4. "
        "The exit code is 1 when not even one sequence fits."
    )
    parser.add_argument("--target", required=True, metavar="MODEL[:DTYPE]")
    parser.add_argument(
        "--draft",
        required=True,
        metavar="MODEL[:DTYPE]",
        help=f"or {SELF_DRAFTER}: made of the target, in its process",
    )
    parser.add_argument(
        "--gpu-memory", type=above_zero(float), default=80.0, metavar="GB", help="memory of one GPU; default 80"
    )
    parser.add_argument(
        "--gpus", type=above_zero(int), default=1, metavar="N", help="GPUs that share the target; default 1"
    )
    parser.add_argument(
        "--draft-gpu-memory",
        type=above_zero(float),
        metavar="GB",
        help="memory of the draft's own GPU (default: it shares the target's)",
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        type=above_zero(int),
        default=0,
        metavar="N",
        help="include the memory of the PyTorch engine's recorded steps of up to N tokens",
    )
    parser.add_argument("--context", type=above_zero(int), default=4096, metavar="TOKENS", help="default 4096")
    parser.add_argument(
        "--sequences", type=above_zero(int), default=1, metavar="N", help="concurrent sequences; default 1"
    )
    parser.add_argument(
        "--num-speculative-tokens", type=int, choices=range(1, 65), default=5, metavar="K", help="default 5"
    )
    parser.add_argument("--block-size", type=above_zero(int), default=16, metavar="TOKENS", help="default 16")
    parser.add_argument(
        "--memory-utilization",
        type=above_zero(float, at_most=1),
        default=0.9,
        metavar="SHARE",
        help="share of the memory without the weights for the KV cache; default 0.9",
    )


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code: 1 if not even one sequence fits. Raises ConfigurationError."""

    def memory(gigabytes: float) -> Memory:
        rows, block_size = arguments.max_num_batched_tokens, arguments.block_size
        return Memory(gigabytes, arguments.memory_utilization, block_size, rows, arguments.context)

    draft_gigabytes: float | None = arguments.draft_gpu_memory
    target = PlannedModel.parse(arguments.target)
    if arguments.draft == SELF_DRAFTER:
        if draft_gigabytes is not None:
            raise ConfigurationError(
                f"--draft {arguments.draft} is on the target's GPU, whose tensors it uses: leave --draft-gpu-memory out"
            )
        draft = target.drafting_in_process()
    else:
        draft = PlannedModel.parse(arguments.draft)
    budgets = plan_pair(
        target,
        draft,
        arguments.num_speculative_tokens,
        memory(arguments.gpu_memory * arguments.gpus),
        None if draft_gigabytes is None else memory(draft_gigabytes),
    )
    print("\n\n".join(describe(budget, arguments.context, arguments.sequences) for budget in budgets))
    return 0 if all(budget.largest_batch(arguments.context) for budget in budgets) else 1
