"""vLLM as the target.

worker's process                        engine core's process (vLLM's)
VllmTarget ── requests ──▶ AsyncLLM ──▶ CoordinatedScheduler ──▶ vLLM's runner, a process for each rank
    ▲                                        │    ▲
    └──────── channel: outputs, readings ────┘    └── CoordinatedRounds: Coordinator, DraftPool and its links
              endpoints of draft workers ──▶
"""
