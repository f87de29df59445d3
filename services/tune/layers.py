"""Searches the layers that layer-skip should keep.

Layers are left out one after the other: each time the layer without which the model's next tokens agree most with the
whole model's (as Zhang et al., arXiv 2309.08168, search, but greedily). Of the resulting sets, the one with the best
predicted speed is taken; a draft costs the share of the layers that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cluster.config import Config
from cluster.engine.batch import Segment
from cluster.engine.loader import LoadedModel
from cluster.engine.runner import ModelRunner, load_weights
from cluster.speculation.speed import RoundCosts, best_num_speculative_tokens, speedup
from cluster.tokenization import Tokenizer

_NUM_TOKENS = 192  # tokens of each text


def search_layers(
    config: Config, texts: Sequence[str], tokenizer: Tokenizer, did_one: Callable[[], object] = lambda: None
) -> tuple[int, ...]:
    """Returns the layers of the target of `config` to keep; none if no set should pay. Raises ConfigurationError."""
    loaded = load_weights(config.target)
    rows = [tokenizer.encode(text)[:_NUM_TOKENS] for text in texts]
    whole = _choices(loaded, config, rows)
    kept = tuple(range(loaded.config.num_layers))
    best: tuple[int, ...] = ()
    best_gain = 1.0
    while len(kept) > 1:
        agreements = {}
        for layer in kept:
            without = tuple(other for other in kept if other != layer)
            agreements[without] = _agreement(_choices(loaded.with_layers(without), config, rows), whole)
            did_one()
        kept = max(agreements, key=lambda layers: agreements[layers])
        gain = _gain(agreements[kept], len(kept) / loaded.config.num_layers)
        if gain > best_gain:
            best, best_gain = kept, gain
    return best


def num_trials(num_layers: int) -> int:
    """Returns the number of forward passes over the texts that a search takes."""
    return num_layers * (num_layers + 1) // 2 - 1


def _gain(agreement: float, cost: float) -> float:
    costs = RoundCosts(cost, 1.0)
    return speedup(agreement, best_num_speculative_tokens(agreement, costs), costs)


def _choices(loaded: LoadedModel, config: Config, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Returns the likeliest next token at every place of `rows`, one after the other."""
    block_size = config.target.block_size
    runner = ModelRunner(loaded, block_size, -(-_NUM_TOKENS // block_size), enable_prefix_caching=False)
    runner.model.prepare(_NUM_TOKENS, _NUM_TOKENS)
    chosen = []
    for row in rows:
        table = runner.blocks.allocate(runner.blocks.num_blocks_for(len(row)))
        assert table is not None
        chosen.append(runner.run([Segment(list(row), 0, table, num_logits=len(row))]).argmax(dim=-1))
        runner.blocks.free(table)
    return torch.cat(chosen)


def _agreement(own: torch.Tensor, whole: torch.Tensor) -> float:
    return (own == whole).float().mean().item()
