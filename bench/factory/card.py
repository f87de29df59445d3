"""Model cards, written only from facts that the stages recorded."""

from collections.abc import Sequence
from typing import Any

from bench.factory.workspace import Workspace, read_json

_NUM_PACKAGES_LISTED = 200

_FRONT_MATTER = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
language: [code]
tags: [speculative-decoding, python]
---
"""

_INTRODUCTION = {
    "target": (
        "# Outrider bundled target\n\n"
        "A small Llama that continues Python source. It is the target of the pair that Outrider bundles: "
        "large enough for speculative decoding to be worth its while on a CPU, small enough to ship. "
        "It is for demonstrations, tests and benchmarks; it is no assistant."
    ),
    "draft": (
        "# Outrider bundled draft\n\n"
        "The draft of the pair that Outrider bundles: distilled from the bundled target, by KL(target || draft) "
        "on the target's whole distributions, over corpus text and over text sampled from the target. "
        "It has the target's tokenizer."
    ),
    "eagle": (
        "# Outrider bundled EAGLE head\n\n"
        "An EAGLE-3 head for the target that Outrider bundles (`draft.drafter: eagle`; vLLM's `method: eagle3`). "
        "It was trained on the target's hidden states over corpus text and over text sampled from the target, to "
        "maximize the probability that target and head choose the same token under shared noise, also with its own "
        "output as input. It drafts only the most frequent tokens. The embedding is the target's, so it is not in this "
        "folder."
    ),
}

_LICENCES = (
    "The weights are released under Apache-2.0. The training text is source code and documentation from the "
    "packages below, each under its own licence as declared in its metadata; packages that declare a "
    "proprietary licence were left out. The text itself is not part of this folder. A model this size can "
    "still repeat short passages of it, which stay under their authors' licences."
)


def model_card(workspace: Workspace, name: str) -> str:
    """Return the README.md of the model called ``name``."""
    corpus = read_json(workspace.corpus_facts)
    tokens = read_json(workspace.token_facts)
    training = read_json(workspace.training_facts(name))
    evaluation = read_json(workspace.evaluation)
    sections = [
        _FRONT_MATTER + _INTRODUCTION[name],
        _training_section(training),
        _evaluation_section(evaluation),
        _corpus_section(corpus, tokens),
        "## Licences\n\n" + _LICENCES,
        _packages_section(corpus["packages"]),
    ]
    return "\n\n".join(sections) + "\n"


def head_card(workspace: Workspace) -> str:
    """Return the README.md of the EAGLE head."""
    corpus, tokens = read_json(workspace.corpus_facts), read_json(workspace.token_facts)
    acceptance = read_json(workspace.head_evaluation)
    sections = [
        _FRONT_MATTER + _INTRODUCTION["eagle"],
        _training_section(read_json(workspace.training_facts("eagle"))),
        "## Held-out results\n\n"
        f"On text that the target itself wrote at temperature 0 after {acceptance['num_prompts']} held-out prompts: "
        f"the first draft is the target's choice at {acceptance['acceptance_rate']:.1%} of "
        f"{acceptance['num_tokens']:,} positions; with {acceptance['num_speculative_tokens']} drafted, "
        f"{acceptance['acceptance_length']:.2f} tokens per round, bonus included.",
        _corpus_section(corpus, tokens),
        "## Licences\n\n" + _LICENCES,
        _packages_section(corpus["packages"]),
    ]
    return "\n\n".join(sections) + "\n"


def _training_section(training: dict[str, Any]) -> str:
    recipe, outcome = training["recipe"], training["outcome"]
    rows = [
        ("parameters", f"{training['parameters']:,}"),
        ("tokens", f"{outcome['tokens']:,} in {outcome['steps']:,} steps"),
        ("batch", f"{recipe['batch_size']} windows of {recipe['sequence_length']} tokens"),
        (
            "optimiser",
            f"AdamW, betas {recipe['betas'][0]} and {recipe['betas'][1]}, weight decay "
            f"{recipe['weight_decay']} on matrices, gradient norm at most {recipe['max_gradient_norm']}",
        ),
        (
            "learning rate",
            f"{recipe['learning_rate']}, {recipe['warmup_fraction']:.0%} warm-up, cosine to "
            f"{recipe['final_learning_rate_fraction']:.0%}",
        ),
        ("seed", str(recipe["seed"])),
        ("device", f"{training['device']}, torch {training['torch']}"),
        (
            "time",
            f"{outcome['seconds'] / 60:.1f} minutes at {outcome['tokens_per_second']:,.0f} tokens/s",
        ),
        ("weights", "bfloat16"),
    ]
    return "## Training\n\n" + _table(("", ""), rows)


def _evaluation_section(evaluation: dict[str, Any]) -> str:
    losses = [
        (name, f"{loss['nats_per_token']:.4f}", f"{loss['bits_per_byte']:.4f}")
        for name, loss in evaluation["held_out_loss"].items()
    ]
    acceptance = [
        (
            str(row["temperature"]),
            f"{row['acceptance_rate']:.3f}",
            f"{row['acceptance_length']:.2f}",
        )
        for row in evaluation["acceptance"]
    ]
    first = evaluation["acceptance"][0]
    explanation = (
        f"Acceptance of the draft on text that the target itself wrote after {first['num_prompts']} held-out "
        f"prompts ({first['num_tokens']:,} tokens at each temperature), both sampling with the same Gumbel "
        f"noise. The length is tokens per round with {first['num_speculative_tokens']} drafted, bonus included."
    )
    return "\n\n".join(
        [
            "## Held-out results",
            _table(("model", "nats per token", "bits per byte"), losses),
            explanation,
            _table(("temperature", "acceptance rate", "acceptance length"), acceptance),
        ]
    )


def _corpus_section(corpus: dict[str, Any], tokens: dict[str, Any]) -> str:
    train, held_out, dialogues = corpus["train"], corpus["held_out"], corpus["dialogues"]
    return (
        "## Training text\n\n"
        f"Files that came with Python {corpus['python']} and the packages installed beside it: "
        f"{train['documents']:,} files, {train['bytes']:,} bytes. "
        f"Another {held_out['documents']:,} files ({held_out['bytes']:,} bytes) are held out by the hash of "
        f"their path. {dialogues['documents']:,} dialogues ({dialogues['bytes']:,} bytes) were made from "
        "docstrings and the functions they describe. "
        f"In tokens: {tokens['train']['tokens']:,} to train on, {tokens['held_out']['tokens']:,} held out."
    )


def _packages_section(packages: list[dict[str, Any]]) -> str:
    rows = [
        (
            " ".join([package["name"], package["version"]]).strip(),
            f"{package['bytes']:,}",
            package["licence"].replace("|", "/"),
        )
        for package in packages[:_NUM_PACKAGES_LISTED]
    ]
    section = "## Packages\n\n" + _table(("package", "bytes", "declared licence"), rows)
    num_left = len(packages) - len(rows)
    return section + (f"\n\nand {num_left} smaller ones." if num_left else "")


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
