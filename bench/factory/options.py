"""The options of a training."""

from dataclasses import dataclass
from pathlib import Path

STAGES = {
    "pair": ("corpus", "tokenizer", "target", "samples", "draft", "evaluate", "export"),
    "eagle": ("corpus", "adopt", "samples", "eagle", "evaluate-eagle", "export-eagle"),
}
"Stages of the work in their order, by what is trained."


@dataclass(frozen=True)
class TrainingOptions:
    """Options of a training.

    With the defaults, a pair takes hours on a small CPU, and a head minutes. Use larger values on a GPU.
    """

    out: Path
    what: str = "pair"
    stages: tuple[str, ...] = ()  # empty: all stages of `what`
    target: str = "outrider-target-12m"
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
    eagle_tokens: int = 500_000
    batch_size: int = 16
    eagle_batch_size: int = 2
    eagle_vocabulary: int = 32_000
    sequence_length: int = 512
    target_learning_rate: float = 1e-3
    draft_learning_rate: float = 2e-3
    eagle_learning_rate: float = 4e-3
    evaluate_every: int = 500
    evaluation_tokens: int = 131_072
    checkpoint_minutes: float = 5.0
    samples: int = 3072
    eagle_samples: int = 256
    sample_batch_size: int = 256
    on_policy_fraction: float = 0.5
    acceptance_prompts: int = 120

    def __post_init__(self) -> None:
        known = STAGES[self.what]
        unknown = [stage for stage in self.stages if stage not in known]
        if unknown:
            raise ValueError(f"unknown stage {unknown[0]!r}; the stages of {self.what} are {', '.join(known)}")
        if self.target_tokens < self.tokens_per_step or self.draft_tokens < self.tokens_per_step:
            raise ValueError(f"a single step takes {self.tokens_per_step} tokens")
        if self.eagle_tokens < self.eagle_tokens_per_step:
            raise ValueError(f"a single step of an EAGLE head takes {self.eagle_tokens_per_step} tokens")
        if self.seed < 0:
            raise ValueError("the seed must not be negative")
        if not 0 <= self.on_policy_fraction <= 1:
            raise ValueError("the on-policy fraction must lie between 0 and 1")

    @property
    def chosen_stages(self) -> tuple[str, ...]:
        return self.stages or STAGES[self.what]

    @property
    def num_samples(self) -> int:
        """Rows of text to sample from the target."""
        return self.eagle_samples if self.what == "eagle" else self.samples

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length

    @property
    def eagle_tokens_per_step(self) -> int:
        return self.eagle_batch_size * self.sequence_length
