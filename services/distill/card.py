"""The model card of a distilled draft, from recorded facts of its training only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.training.recipe import Recipe
    from services.training.traffic_acceptance import TrafficAcceptance


_KINDS = {
    "model": "A draft for TARGET, with the same tokenizer",
    "parallel": "A draft for TARGET, with the same tokenizer. It makes all tokens of a proposal in one step, from mask "
    "tokens (PARD, arXiv 2504.18583; `pard_token` in config.json)",
    "eagle": "An EAGLE-3 head (arXiv 2503.01840) for TARGET, whose hidden states it reads",
    "medusa": "Medusa heads (arXiv 2401.10774) for TARGET, whose hidden states they read",
}


@dataclass(frozen=True, slots=True)
class Distilled:
    """The result of `outrider distill`."""

    target: str
    draft: str | None  # the draft it began with; None: a new one
    num_parameters: int
    num_taught: int  # number of answers
    num_taught_tokens: int
    num_held_out: int
    recipe: Recipe
    before: Sequence[TrafficAcceptance]
    after: Sequence[TrafficAcceptance]
    drafter: str = "model"  # as in `draft.drafter`


def model_card(name: str, result: Distilled) -> str:
    """Returns the README.md of the draft called `name`."""
    recipe = result.recipe
    facts = {
        "parameters": f"{result.num_parameters:,}",
        "begun with": result.draft or "a new model",
        "answers": f"{result.num_taught:,} ({result.num_taught_tokens:,} tokens), at temperatures 0, 0.7 and 1 in turn",
        "steps": f"{recipe.steps:,} of {recipe.batch_size} answers",
        "learning rate": f"{recipe.learning_rate:g}",
        "seed": f"{recipe.seed}",
        "weights": "bfloat16",
    }
    rows = [
        f"| {new.temperature:g} | {old.rate:.3f} | {new.rate:.3f} | {new.length:.2f} |"
        for old, new in zip(result.before, result.after, strict=True)
    ]
    return "\n".join(
        [
            f"# {name}\n",
            f"{_KINDS[result.drafter].replace('TARGET', result.target)}. Trained by `outrider distill` on that model's "
            f"answers to logged prompts. Use with `draft.drafter: {result.drafter}`.\n",
            "|  |  |\n| --- | --- |",
            *(f"| {key} | {value} |" for key, value in facts.items()),
            f"\nAcceptance on the target's answers to {result.num_held_out:,} held-out prompts, given all tokens "
            "before each token and with the noise that drew it. The length is the mean number of tokens per round of 4 "
            "drafts, including the bonus token.\n",
            "| temperature | acceptance before | after | acceptance length |\n| --- | --- | --- | --- |",
            *rows,
            "\nBy position in a proposal, of the drafts whose predecessors are accepted, before and after:\n",
            "| temperature | acceptance before | after |\n| --- | --- | --- |",
            *(
                f"| {new.temperature:g} | {by_position(old)} | {by_position(new)} |"
                for old, new in zip(result.before, result.after, strict=True)
            ),
            "",
        ]
    )


def by_position(acceptance: TrafficAcceptance) -> str:
    """Shares with two decimals, as in `TrafficAcceptance.by_position`."""
    return ", ".join(f"{share:.2f}" for share in acceptance.by_position)
