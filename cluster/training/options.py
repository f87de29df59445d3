"""What a user can decide about a training."""

from dataclasses import dataclass
from pathlib import Path

STAGES = ("corpus", "tokenizer", "target", "samples", "draft", "evaluate", "export")


@dataclass(frozen=True)
class TrainingOptions:
    """The defaults finish within hours on a small CPU; a GPU deserves larger numbers."""

    out: Path
    stages: tuple[str, ...] = STAGES
    resume: bool = False
    seed: int = 0
    device: str = "auto"
    compile: bool = False
    deterministic: bool = True
    site_packages: bool = False
    package_limit_mb: float = 24.0
    dialogues_mb: float = 4.0
    tokenizer_sample_mb: float = 32.0
    target_tokens: int = 12_000_000
    draft_tokens: int = 12_000_000
    batch_size: int = 16
    sequence_length: int = 512
    target_learning_rate: float = 1e-3
    draft_learning_rate: float = 2e-3
    evaluate_every: int = 500
    evaluation_tokens: int = 131_072
    checkpoint_minutes: float = 5.0
    samples: int = 3072
    sample_batch_size: int = 256
    on_policy_fraction: float = 0.5
    acceptance_prompts: int = 120

    def __post_init__(self) -> None:
        unknown = [stage for stage in self.stages if stage not in STAGES]
        if unknown:
            raise ValueError(f"unknown stage {unknown[0]!r}; the stages are {', '.join(STAGES)}")
        if self.target_tokens < self.tokens_per_step or self.draft_tokens < self.tokens_per_step:
            raise ValueError(f"a single step takes {self.tokens_per_step} tokens")
        if self.seed < 0:
            raise ValueError("the seed is not negative")
        if not 0 <= self.on_policy_fraction <= 1:
            raise ValueError("the on-policy fraction lies between 0 and 1")

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length
