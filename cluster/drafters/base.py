"""Interface of drafters, and a drafter's state of a sequence."""

from __future__ import annotations

import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cluster.drafters.read_tokens import NUM_SINKS, ContextTokens, context_choices
from cluster.speculation.drafts import Drafts, descendants_of, path_to, renumbered
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.speculation.tree import Shape
from cluster.telemetry.metrics import Reading
from cluster.vocabulary_map import VocabularyMap


@dataclass(eq=False, slots=True)
class DraftSequence:
    """A sequence in a draft worker: committed tokens, then a tree of drafts after them.

    Node n of the tree is `token_ids[num_committed + n]`; -1 is the last committed token. A parent has a lower number
    than its children. Extending a node gives it children with consecutive numbers, the likeliest first. The main path
    goes from likeliest child to likeliest child. A chain has no other nodes.

    If the draft lacks a committed token of the target, the sequence holds several of the draft's tokens in its place.
    Each draft is one token of the target, so the positions of all drafts are `num_added` above the target's.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    noise_key: NoiseKey
    num_owed: int  # k: drafts owed per round
    window: int  # maximum depth of drafts after the committed tokens
    shape: Shape | None = None  # shape of the owed tree; None: a chain of k
    cache_root: bytes = b""  # KV is shared only between sequences with the same root
    width: int = 1  # maximum number of children of a node
    num_committed: int = 0
    num_added: int = 0  # number of committed tokens here minus the target's number of committed tokens
    context_tokens: int | None = None  # chosen number of last tokens to read; None: all. For a drafter with "auto"
    num_skipped: int = 0  # number of committed tokens that take no place in the draft model's context
    is_exhausted: bool = False  # whether the drafter cannot propose anything after the committed tokens
    lacks_states: bool = False  # whether it is exhausted because the target has not computed its states yet
    wire_id: int = 0  # the sequence's number on its link
    to_extend: list[int] = field(default_factory=list)  # nodes to extend in the next step; empty: the main path's end
    parents: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # best score among the node's siblings minus the node's score
    _children: list[Sequence[int]] = field(default_factory=lambda: [()])  # children of node -1, then of every node
    _depths: list[int] = field(default_factory=lambda: [0])  # depth of node -1, then of every node
    tip: int = -1  # last node of the main path

    def __post_init__(self) -> None:
        self.num_committed = self.num_committed or len(self.token_ids)

    @property
    def base(self) -> int:
        """Number of committed tokens of the target."""
        return self.num_committed - self.num_added

    @property
    def num_drafted(self) -> int:
        """Number of drafts on the main path."""
        return self._depths[self.tip + 1]

    @property
    def draft_token_ids(self) -> list[int]:
        """Tokens of the main path."""
        return self.path_tokens(self.tip)

    @property
    def is_chain(self) -> bool:
        return self.num_drafted == len(self.parents)

    def children(self, node: int) -> Sequence[int]:
        """Returns the children of `node`, likeliest first; empty before `node` is extended."""
        return self._children[node + 1]

    def depth(self, node: int) -> int:
        """Returns the number of drafts on the path to `node`, inclusive."""
        return self._depths[node + 1]

    def token_of(self, node: int) -> int:
        return self.token_ids[self.num_committed + node]

    def path_tokens(self, node: int) -> list[int]:
        """Returns the drafts on the path to `node`, inclusive."""
        start = self.num_committed
        if self.is_chain:
            return self.token_ids[start : start + node + 1]
        return [self.token_ids[start + i] for i in path_to(node, self.parents)]

    def tokens_to(self, node: int) -> Sequence[int]:
        """Returns all tokens up to `node`."""
        if self.is_chain and node == self.tip:
            return self.token_ids
        return self.token_ids[: self.num_committed] + self.path_tokens(node)

    def extend(self, node: int, token_ids: Sequence[int], gaps: Sequence[float]) -> None:
        """Gives `node` its children."""
        assert not self._children[node + 1], f"node {node} was extended before"
        number = len(token_ids)
        if number == 0:
            return
        first = len(self.parents)
        self.token_ids.extend(token_ids)
        self.gaps.extend(gaps)
        self.parents.extend([node] * number)
        self._children[node + 1] = range(first, first + number)
        self._children.extend([()] * number)
        self._depths.extend([self._depths[node + 1] + 1] * number)
        if node == self.tip:
            self.tip = first

    def append(self, token_id: int) -> None:
        """Extends the main path."""
        self.extend(self.tip, [token_id], [0.0])

    def missing(self, max_model_len: int, root: int = -1) -> list[int]:
        """Returns the nodes to extend next towards a complete proposal; empty if the proposal is complete.

        Omits nodes at `max_model_len` tokens. `root`: last committed token that the proposal follows; by default the
        current one, so that it is the owed proposal.
        """
        if self.shape is None:
            end = self.tip if root < 0 else self._end(root)
            nodes = [end] if self.depth(end) - self.depth(root) < self.num_owed else []
        else:
            found = self._find(self.shape, root)
            inner = [found[parent] for parent in dict.fromkeys(self.shape) if parent in found]
            nodes = [node for node in inner if not self.children(node)]
        return [node for node in nodes if self.depth(node) < self.room(max_model_len)]

    def _end(self, node: int) -> int:
        """Returns the end of the path from likeliest child to likeliest child that begins at `node`."""
        while children := self.children(node):
            node = children[0]
        return node

    @property
    def proposal_depth(self) -> int:
        """Number of nodes of the owed proposal that are on the main path."""
        if self.shape is None:
            return self.num_owed
        depth, last = 0, -1
        for node, parent in enumerate(self.shape):
            if parent == last and last not in self.shape[:node]:
                depth, last = depth + 1, node
        return depth

    def room(self, max_model_len: int) -> int:
        """Returns the depth of drafts that fit in a context of `max_model_len` tokens."""
        return max_model_len - self.num_committed + self.num_skipped

    def num_drafts_after(self, node: int, max_model_len: int) -> int:
        """Returns the number of drafts that one step makes after `node`, at least 1.

        They complete a proposal. If the sequence may run ahead, the step makes one more draft, as a guess of the bonus
        token.
        """
        depth, number = self.depth(node), self.proposal_depth + (self.window > self.num_owed)
        if node == self.tip and depth < self.proposal_depth:
            number -= depth  # the owed proposal
        return max(1, min(number, self.window - depth, self.room(max_model_len) - depth))

    def proposal(self) -> Drafts:
        """Returns the part of the owed proposal that is drafted."""
        if self.shape is None:
            return Drafts(self.draft_token_ids[: self.num_owed])
        found = self._find(self.shape, -1)
        del found[-1]
        nodes = list(found)
        parents = renumbered(nodes, self.shape, -1)
        return Drafts.tree([self.token_of(found[node]) for node in nodes], parents)

    def _find(self, shape: Shape, root: int) -> dict[int, int]:
        """Returns a dict from the nodes of `shape` to the nodes below `root` in their place, if these exist."""
        found = {-1: root}
        ranks = dict.fromkeys(shape, 0)
        for node, parent in enumerate(shape):
            rank = ranks[parent]
            ranks[parent] += 1
            if parent in found and rank < len(self.children(found[parent])):
                found[node] = self.children(found[parent])[rank]
        return found

    def commit(self, base: int, token_ids: Sequence[int], num_added: int = 0) -> list[int] | None:
        """Commits `token_ids`, which follow the target's first `base` tokens, and keeps the drafts that still fit.

        `num_added`: number of `token_ids` minus the number of the target's tokens that they spell. Returns the kept
        nodes in order: first the nodes that were committed, then the nodes of the new tree. Returns None and changes
        nothing if `token_ids` end before the known committed tokens. `is_behind(base)` must be False.
        """
        assert not self.is_behind(base)
        if base + len(token_ids) - num_added < self.base:
            return None
        news = token_ids[self.base - base :]
        came_true: list[int] = []
        node = -1
        for token in news:
            child = next((n for n in self.children(node) if self.token_of(n) == token), None)
            if child is None:
                break
            came_true.append(child)
            node = child
        # No draft fits if the target chose another token, or if `num_added` shifts the positions of the drafts.
        still_fit = len(came_true) == len(news) and num_added == 0
        rest = descendants_of(node, self.parents) if still_fit else []
        self._replant(news, node, rest)
        self.num_added += num_added
        self.is_exhausted = self.lacks_states = False
        return came_true + rest

    def _replant(self, news: Sequence[int], root: int, nodes: Sequence[int]) -> None:
        """Commits `news`, and replaces the tree with `nodes`, the descendants of `root`."""
        drafts = [self.token_of(node) for node in nodes]
        gaps = [self.gaps[node] for node in nodes]
        parents = renumbered(nodes, self.parents, root)
        del self.token_ids[self.num_committed :]
        self.token_ids.extend(news)
        self.num_committed = len(self.token_ids)
        self.parents, self.gaps, self._children, self._depths, self.tip = [], [], [()], [0], -1
        start = 0
        for parent, siblings in itertools.groupby(parents):
            end = start + len(list(siblings))
            self.extend(parent, drafts[start:end], gaps[start:end])
            start = end

    def drop_drafts(self) -> None:
        self._replant([], -1, [])

    def is_behind(self, base: int) -> bool:
        """Returns True if this worker has fewer than `base` committed tokens."""
        return base > self.base


class Drafter(ABC):
    """Proposes tokens. Not thread-safe. Extends the sequences that it gets in place."""

    max_model_len: int
    vocab_size: int  # without a `vocabulary`, token IDs of a sequence must be smaller
    vocabulary: VocabularyMap | None = None  # None: the target's token IDs are the drafter's
    translates = False  # whether the drafter itself converts the target's token IDs, whatever its vocabulary
    context_tokens: ContextTokens = None  # number of last tokens to read of a sequence; None: all
    dtype: str
    num_blocks: int  # blocks of the KV cache
    block_size: int  # tokens per block
    num_step_rows: int | None = None  # rows of the last step; None: one per sequence
    is_one_pass = False  # whether one step drafts a whole proposal

    @property
    @abstractmethod
    def num_used_blocks(self) -> int:
        """Blocks of the KV cache in use."""

    @property
    def free_tokens(self) -> int | None:
        """Number of tokens of new sequences that the drafter has room for; None: unlimited."""
        return None

    @property
    def max_tokens_read(self) -> int | None:
        """Maximum number of tokens of a new sequence that need room; None: all of them."""
        number = context_choices(sys.maxsize)[0] if self.context_tokens == "auto" else self.context_tokens
        return None if number is None else NUM_SINKS + number

    def prompt_seconds(self, num_tokens: int) -> float:
        """Returns the predicted seconds to compute a prompt of `num_tokens` tokens; 0 if unknown."""
        return 0.0

    def contexts(self, sequence: DraftSequence) -> list[int | None]:
        """Returns how many last tokens of `sequence` to read, preferred first; None: all tokens of the sequence."""
        if self.context_tokens != "auto":
            return [self.context_tokens]
        chosen = sequence.context_tokens
        smaller = [n for n in context_choices(sequence.num_committed) if n is not None and n < (chosen or sys.maxsize)]
        return [chosen, *reversed(smaller)]

    def num_last_again(self, sequence: DraftSequence) -> int:
        """Returns how many last tokens to read again when `sequence` has filled the model's context."""
        return min(self.contexts(sequence)[0] or sys.maxsize, self.max_model_len // 2)

    @abstractmethod
    def admit(self, sequence: DraftSequence) -> bool:
        """Allocates memory for `sequence`. Returns False if there is not enough or the sequence cannot be drafted."""

    @abstractmethod
    def draft(self, sequences: Sequence[DraftSequence]) -> list[DraftSequence]:
        """Runs one step: extends each sequence at its nodes `to_extend`, or computes a chunk of its prompt.

        Each node gets children. A drafter with `is_one_pass` also extends the first child, the first child of that
        child, and so on. A drafter that only finds a single continuation appends to the main path. If not all sequences
        fit in a step, the step contains the first ones. Sequences without any proposal are marked as exhausted. Returns
        the sequences that have no room for their next token; the caller must release them.
        """

    def num_rows(self, sequence: DraftSequence, node: int) -> int:
        """Returns the number of rows that extending `sequence` at `node` adds to a step.

        Assumes that the tokens before the tree are computed.
        """
        if not self.is_one_pass:
            return 1
        return sequence.depth(node) + sequence.num_drafts_after(node, self.max_model_len) - (node >= 0)

    @abstractmethod
    def rewind(self, sequence: DraftSequence, kept: Sequence[int]) -> None:
        """Updates the cache after a commit of `sequence`. `kept`: the result of `DraftSequence.commit`."""

    @abstractmethod
    def release(self, sequence: DraftSequence) -> None:
        """Releases `sequence` and frees its memory."""

    def readings(self) -> Iterable[Reading]:
        """Returns the metrics of the KV cache. Thread-safe."""
        yield Reading("outrider_kv_blocks", "Total KV blocks.", self.num_blocks)
        yield Reading("outrider_kv_blocks_used", "KV blocks in use.", self.num_used_blocks)
