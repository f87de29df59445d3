"""Runs steps of one model, for target and draft engines: packs segments, computes, returns logits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import torch

from cluster.config.workers import Numerics, WorkerConfig
from cluster.engine.batch import Batch, Segment, Unread, pack, slots_of
from cluster.engine.blocks import BlockManager
from cluster.engine.graph_memory import StepModel, graph_bytes, graph_sizes
from cluster.engine.host_memory import host_cache_bytes
from cluster.engine.kv_cache import KVCache, block_bytes
from cluster.engine.loader import LoadedModel, Progress, load_model, resolve_device, resolve_dtype
from cluster.engine.model import LayerInputs
from cluster.engine.quantization import Quantization
from cluster.engine.weights import ModelWeights
from cluster.errors import ConfigurationError
from cluster.model_folder import resolve_model_folder

logger = logging.getLogger(__name__)


class ModelRunner:
    """A model with a KV cache and the manager of the cache's blocks."""

    def __init__(
        self, loaded: LoadedModel, block_size: int, num_blocks: int, *, enable_prefix_caching: bool = True
    ) -> None:
        self.blocks = BlockManager(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
        weights = loaded.weights
        self._kv_cache = KVCache(loaded.config, num_blocks, block_size, weights.dtype, weights.device)
        self.model = loaded.bind(self._kv_cache)

    @classmethod
    def from_config(
        cls,
        config: WorkerConfig,
        *,
        progress: Progress | None = None,
        numerics: Numerics = "fast",
    ) -> ModelRunner:
        """Loads the model that `config` names, and allocates its cache. Raises ConfigurationError.

        `numerics` as in `load_model`.
        """
        loaded = load_weights(config, progress=progress, numerics=numerics)
        num_bytes = kv_cache_budget(config, loaded, recorded_bytes(config, loaded))
        return cls.with_cache(loaded, config, num_bytes)

    @classmethod
    def with_cache(cls, loaded: LoadedModel, config: WorkerConfig, num_bytes: int) -> ModelRunner:
        """Returns a runner with a KV cache of `num_bytes`. Raises ConfigurationError if not even one block fits."""
        bytes_per_block = block_bytes(loaded.config, config.block_size, loaded.weights.dtype)
        num_blocks = num_bytes // bytes_per_block
        if num_blocks == 0:
            raise ConfigurationError(
                f"{num_bytes} bytes of KV cache hold no block of {config.block_size} tokens of {config.model!r}: "
                f"set kv_cache_bytes to at least {bytes_per_block}"
            )
        runner = cls(loaded, config.block_size, num_blocks, enable_prefix_caching=config.enable_prefix_caching)
        if not loaded.is_head:
            runner.model.prepare(config.max_num_batched_tokens, _max_context(config, loaded))
        return runner

    @property
    def states(self) -> torch.Tensor:
        """The hidden states that the model captures, [num_slots, state_size]."""
        assert self._kv_cache.states is not None, "the model captures no states"
        return self._kv_cache.states

    def run(
        self,
        segments: Sequence[Segment],
        unread: Unread | None = None,
        inputs: Callable[[Batch], LayerInputs] | None = None,
    ) -> torch.Tensor:
        """Runs one step. Returns the logits of the segments' logit rows, in order, [num_logit_rows, vocab_size].

        `unread`: input that is only on the device.
        `inputs`: computes the inputs of the first layer; None: the embeddings of the segments' tokens.
        """
        batch = pack(segments, self.blocks.block_size, self.model.device)
        if unread is not None:
            batch = unread.resolve(batch, self.blocks.block_size)
        return self.model.forward(batch, None if inputs is None else inputs(batch))

    def wait(self) -> None:
        """Waits until all submitted work is computed; a GPU computes asynchronously."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

    def recovers(self) -> bool:
        """Returns True if more steps can run after a failed step. After some errors a GPU no longer responds."""
        if self.model.device.type != "cuda":
            return True
        try:
            torch.cuda.synchronize(self.model.device)
            torch.cuda.empty_cache()  # if memory was short, free cached memory blocks of the wrong size
        except RuntimeError:
            logger.exception("the GPU is lost to this process")
            return False
        return True

    def keep(self, block_table: Sequence[int], start: int, nodes: Sequence[int]) -> None:
        """Moves the KV of a tree's node `nodes[i]` to position `start + i`. Node 0 of the tree is at position `start`.

        The KV of other nodes is lost. `nodes` must be in ascending order.
        """
        moved = [(start + node, start + index) for index, node in enumerate(nodes) if node != index]
        if not moved:
            return

        def slots(positions: Iterable[int]) -> torch.Tensor:
            return torch.tensor(slots_of(positions, block_table, self.blocks.block_size), device=self.model.device)

        self._kv_cache.move(slots(old for old, _ in moved), slots(new for _, new in moved))


def load_weights(
    config: WorkerConfig,
    *,
    progress: Progress | None = None,
    numerics: Numerics = "fast",
    ends: ModelWeights | None = None,
    rows: Sequence[int] | None = None,
    num_outputs: int | None = None,
) -> LoadedModel:
    """Loads the model that `config` names; `numerics` and later parameters as in `load_model`.

    Raises ConfigurationError.
    """
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    quantization = quantization_of(config)
    folder = resolve_model_folder(config.model)
    return load_model(
        folder,
        dtype,
        device,
        progress,
        quantization=quantization,
        numerics=numerics,
        ends=ends,
        rows=rows,
        num_outputs=num_outputs,
    )


def quantization_of(config: WorkerConfig) -> Quantization | None:
    """Returns the quantization of the layers that `config` sets; None if it sets none."""
    return config.quantization and Quantization.named(config.quantization, config.quantization_group_size)


def recorded_bytes(config: WorkerConfig, model: LoadedModel) -> int:
    """Returns the bytes of GPU memory of the steps recorded at start; 0 if none are recorded."""
    if not model.records_steps:
        return 0
    sizes, max_context = graph_sizes(config.max_num_batched_tokens), _max_context(config, model)
    return graph_bytes(
        *(StepModel.of(model.config), sizes, max_context, config.block_size, model.weights.dtype.itemsize),
        has_parts=model.form.is_invariant or config.quantization is not None,
    )


def _max_context(config: WorkerConfig, model: LoadedModel) -> int:
    return model.config.resolve_max_model_len(config.max_model_len)


def kv_cache_budgets(
    target: WorkerConfig, target_model: LoadedModel, draft: WorkerConfig, draft_model: LoadedModel
) -> tuple[int, int]:
    """Returns the bytes of the KV caches of a target and of the draft in its process. Both models must be loaded.

    If both are on one GPU and only one cache has a configured size, the other cache gets what remains of its share of
    the memory. If neither size is configured, `target` determines the total, and both caches hold the same number of
    tokens. On a CPU, too, `target` determines what both may take together.
    """
    device = target_model.weights.device
    of_target, of_draft = recorded_bytes(target, target_model), recorded_bytes(draft, draft_model)
    if draft_model.weights.device != device:
        return kv_cache_budget(target, target_model, of_target), kv_cache_budget(draft, draft_model, of_draft)
    if device.type != "cuda":
        shares = in_proportion(100, _token_bytes(target_model), _token_bytes(draft_model))
        halves = [
            config.model_copy(update={"memory_utilization": target.memory_utilization * share / 100})
            for config, share in zip((target, draft), shares, strict=True)
        ]
        return kv_cache_budget(halves[0], target_model), kv_cache_budget(halves[1], draft_model)
    num_bytes = [kv_cache_budget(*one, of_target + of_draft) for one in ((target, target_model), (draft, draft_model))]
    if target.kv_cache_bytes is None and draft.kv_cache_bytes is None:
        return in_proportion(num_bytes[0], _token_bytes(target_model), _token_bytes(draft_model))
    if target.kv_cache_bytes is None:
        return max(0, num_bytes[0] - num_bytes[1]), num_bytes[1]
    if draft.kv_cache_bytes is None:
        return num_bytes[0], max(0, num_bytes[1] - num_bytes[0])
    return num_bytes[0], num_bytes[1]


def in_proportion(num_bytes: int, first: int, second: int) -> tuple[int, int]:
    """Divides `num_bytes` in proportion to `first` and `second`."""
    of_first = num_bytes * first // (first + second)
    return of_first, num_bytes - of_first


def _token_bytes(model: LoadedModel) -> int:
    """Returns the bytes of the KV of one token."""
    return block_bytes(model.config, 1, model.weights.dtype)


def kv_cache_budget(config: WorkerConfig, model: LoadedModel, recorded_bytes: int = 0) -> int:
    """Returns the bytes of the KV cache of `model`. `recorded_bytes` stay free for recorded steps."""
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes
    device = model.weights.device
    if device.type != "cuda":
        return host_cache_bytes(config, _max_context(config, model), _token_bytes(model))
    torch.cuda.empty_cache()  # memory left over from loading counts as free
    free, total = torch.cuda.mem_get_info(device)
    num_bytes = max(0, int(config.memory_utilization * total) - (total - free) - recorded_bytes)
    logger.info(
        "KV cache: %.1f GB, what %.2f GB in use and %.2f GB of recorded steps leave of %g of the GPU's memory",
        *(num_bytes / 1e9, (total - free) / 1e9, recorded_bytes / 1e9, config.memory_utilization),
    )
    return num_bytes
