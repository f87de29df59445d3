"""The model card of a distilled draft, from recorded facts of its training only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.training.traffic_acceptance import TrafficAcceptance
    from services.training.trainer import Recipe


_KINDS = {
    "model": "A draft for TARGET, whose tokenizer it has",
    "parallel": "A draft for TARGET, whose tokenizer it has. It makes all tokens of a proposal in one step, from mask "
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


def model_card(name: str, told: Distilled) -> str:
    """Returns the README.md of the draft called `name`."""
    recipe = told.recipe
    facts = {
        "parameters": f"{told.num_parameters:,}",
        "begun with": told.draft or "a new model",
        "answers": f"{told.num_taught:,}, of {told.num_taught_tokens:,} tokens, at temperatures 0, 0.7 and 1 in turn",
        "steps": f"{recipe.steps:,} of {recipe.batch_size} answers",
        "learning rate": f"{recipe.learning_rate:g}",
        "seed": f"{recipe.seed}",
        "weights": "bfloat16",
    }
    rows = [
        f"| {new.temperature:g} | {old.rate:.3f} | {new.rate:.3f} | {new.length:.2f} |"
        for old, new in zip(told.before, told.after, strict=True)
    ]
    return "\n".join(
        [
            f"# {name}\n",
            f"{_KINDS[told.drafter].replace('TARGET', told.target)}: `outrider distill` taught it what that model says "
            f"at every place of its own answers to logged prompts. Use it with `draft.drafter: {told.drafter}`.\n",
            "|  |  |\n| --- | --- |",
            *(f"| {key} | {value} |" for key, value in facts.items()),
            f"\nAcceptance on the target's answers to {told.num_held_out:,} prompts that were held out, given all that "
            "is before each token and with the noise that drew it; the length is tokens a round of 4 drafts, the bonus "
            "token included.\n",
            "| temperature | acceptance before | after | acceptance length |\n| --- | --- | --- | --- |",
            *rows,
            "\nBy position in a proposal, of the drafts whose predecessors are accepted, before and after:\n",
            "| temperature | acceptance before | after |\n| --- | --- | --- |",
            *(
                f"| {new.temperature:g} | {by_position(old)} | {by_position(new)} |"
                for old, new in zip(told.before, told.after, strict=True)
            ),
            "",
        ]
    )


def by_position(acceptance: TrafficAcceptance) -> str:
    """Shares with two decimals, as in `TrafficAcceptance.by_position`."""
    return ", ".join(f"{share:.2f}" for share in acceptance.by_position)
