"""vLLM as a target and as a drafter, by the processes that run the code; for the versions in `compatibility.py`.

target/: worker's process               core/: engine core's process               runner/: a process for each rank
VllmTarget ── requests ──▶ AsyncLLM ──▶ CoordinatedScheduler ── steps, drafts ──▶ vLLM's runner, coupled sampling
    ▲                                        │    ▲
    └──────── channel: outputs, readings ────┘    └── CoordinatedRounds: Coordinator, DraftPool and its links
              endpoints of draft workers ──▶

In `drafter.py` the engine core, with one rank also the runner, is in the draft worker's process. The plugin for
`vllm serve` (`cluster/vllm_plugin/`) has the same scheduler and runner, without the worker's process.
"""
