"""Ready-to-load Hugging Face folders: weights, configuration, tokenizer and model card."""

import shutil
from pathlib import Path

from bench.factory.card import model_card
from bench.factory.workspace import Workspace


def export_model(workspace: Workspace, name: str) -> None:
    """Write the folder of the model called ``name``. Its card is written last."""
    directory = workspace.export(name)
    directory.mkdir(parents=True, exist_ok=True)
    for source in (workspace.model(name), workspace.tokenizer):
        for file in sorted(source.iterdir()):
            shutil.copyfile(file, directory / file.name)
    card = model_card(workspace, name)
    Path(directory / "README.md").write_text(card, encoding="utf-8")
