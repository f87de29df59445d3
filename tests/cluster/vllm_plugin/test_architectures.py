"""Architectures in the interpreter, one with pictures in prompts: drafts change no token."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bench.workload import held_out_prompts
from cluster.model_folder import ASSETS
from cluster.tokenization import Tokenizer
from tests.background_loop import BackgroundLoop
from tests.soak import only_in_soak
from tests.system.client import Case
from tests.system.vllm.architectures import ARCHITECTURES, REFUSED, save_checkpoint, save_random

from .engine import Engine
from .knowing_draft import KnowingDraft
from .test_exactness import SAMPLING

VOCAB_SIZE = 4096  # that of the bundled tokenizer, without the tokens around pictures
IMAGE, AROUND, WHOLE, END = range(VOCAB_SIZE, VOCAB_SIZE + 4)
NAMES = {
    IMAGE: "<image>",
    AROUND: "<fake_token_around_image>",
    WHOLE: "<global-img>",
    END: "<end_of_utterance>",
}
READ = (AROUND, WHOLE, *[IMAGE] * 4, AROUND)  # what the model reads for one `IMAGE` of a prompt
NUM_CASES = 12
PICTURES = "Idefics3"
RESULTS = Path("bench/results/plugin-architectures.json")


def save_idefics3(folder: Path) -> Path:
    """Writes a small random checkpoint, with the bundled tokenizer and the tokens around pictures."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 128, "intermediate_size": 128}
    text = {"model_type": "llama", "vocab_size": VOCAB_SIZE + len(NAMES), "max_position_embeddings": 512, **layers}
    text |= {"num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    vision = {"image_size": 28, "patch_size": 7, **layers}
    options = {"image_token_id": IMAGE, "scale_factor": 2, "tie_word_embeddings": False, "pad_token_id": 0}
    config = Idefics3Config(text_config=text, vision_config=vision, **options)
    save_random(Idefics3ForConditionalGeneration(config), folder)
    bundled = ASSETS / "outrider-target-12m"
    tokenizer = json.loads((bundled / "tokenizer.json").read_text(encoding="utf-8"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    tokenizer["added_tokens"] += [{"id": token, "content": name, **flags} for token, name in NAMES.items()]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    shutil.copy(bundled / "tokenizer_config.json", folder)
    edge = {"longest_edge": 28}
    names = {"image_processor_type": "Idefics3ImageProcessor", "processor_class": "Idefics3Processor"}
    pixels = {**names, "do_image_splitting": False, "size": edge, "max_image_size": edge}
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels), encoding="utf-8")
    (folder / "processor_config.json").write_text(json.dumps({**names, "image_seq_len": 4}), encoding="utf-8")
    return folder


def cases(*, has_pictures: bool) -> list[Case]:
    """Held-out text, perhaps with a picture in two prompts of three. Then the last two prompts differ in it only."""
    made = []
    for index, prompt in enumerate(held_out_prompts(NUM_CASES, seed=3)):
        fields: dict[str, Any] = {**SAMPLING[index % len(SAMPLING)], "ignore_eos": True}
        token_ids = list(prompt[: 10 + 12 * (index % 5)])
        if has_pictures and index % 3:
            token_ids.insert(5, IMAGE)
            fields["picture"] = index
        made.append(Case(tuple(token_ids), index, 16, fields))
    return [*made, dataclasses.replace(made[-1], fields=made[-1].fields | {"picture": 0})] if has_pictures else made


@only_in_soak
@pytest.mark.parametrize("name", [PICTURES, *(name for name in ARCHITECTURES if name not in REFUSED)])
def test_drafts_change_no_token(name: str, tmp_path: Path, loop: BackgroundLoop) -> None:
    has_pictures = name == PICTURES
    folder = tmp_path / "model"
    model = save_idefics3(folder) if has_pictures else save_checkpoint(name, folder)
    asked = cases(has_pictures=has_pictures)
    draft = KnowingDraft(loop, VOCAB_SIZE, Tokenizer(model).fingerprint())
    speculation = {"controller": "fixed", "num_speculative_tokens": 6, "max_speculative_tokens": 6}
    settings = {"draft_addresses": [draft.address], "speculation": speculation | {"draft_timeout_ms": 10_000}}
    sizes = {"max_model_len": 160, "max_num_seqs": 8, "max_num_batched_tokens": 128}
    try:
        with Engine(tmp_path, {"outrider": settings}, model=str(model), **sizes) as engine:
            plain = {"extra_args": {"num_speculative_tokens": 0}}
            expected = engine.generate([dataclasses.replace(case, fields=case.fields | plain) for case in asked])
            assert engine.counters()["vllm:spec_decode_num_draft_tokens"] == 0
            read = [[part for token in case.prompt for part in (READ if token == IMAGE else [token])] for case in asked]
            draft.worker.truths = [[*prompt, *answer] for prompt, answer in zip(read, expected, strict=True)]
            answers, counters = engine.generate(asked), engine.counters()
    finally:
        draft.stop()
    different = [a != b for pair in zip(answers, expected, strict=True) for a, b in zip(*pair, strict=True)]
    row = {
        "num_tokens": len(different),
        "num_different_tokens": sum(different),
        "num_drafts": int(counters["vllm:spec_decode_num_draft_tokens"]),
        "num_accepted_drafts": int(counters["vllm:spec_decode_num_accepted_tokens"]),
    }
    print(f"{name}: {row}")
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(rows | {name: row}, indent=2) + "\n", encoding="utf-8")
    assert not any(different)
    assert row["num_accepted_drafts"] > 0.4 * row["num_drafts"] > 0  # accepted tokens that fill rows count, too
    if has_pictures:
        assert expected[-1] != expected[-2]  # the model sees the pictures
