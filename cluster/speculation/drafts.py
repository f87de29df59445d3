"""Draft tokens of one round: a chain, or a tree in which the target's choices follow one path."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import ne


def num_useful_drafts(limit: int, num_tokens: int, max_len: int) -> int:
    """Returns the number of drafts, at most `limit`, that fit before `max_len` after the place of the bonus token."""
    return max(0, min(limit, max_len - num_tokens - 1))


@dataclass(slots=True)  # not frozen: one is made per sequence and step, and freezing doubles the time
class Drafts:
    """Draft tokens after the last committed token.

    In a tree, `parents` contains the index of every token's parent, or -1 if the parent is the last committed token.
    None: a chain. A parent comes before its children, so the first n tokens are always valid drafts by themselves.
    """

    token_ids: Sequence[int] = ()
    parents: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def depth(self) -> int:
        """Number of tokens on the longest path."""
        return len(self) if self.parents is None else max(depths_of(self.parents), default=0)

    def fill_in(self, token_ids: Sequence[int]) -> None:
        """Replaces the tokens, which stood for the first ones of `token_ids`."""
        self.token_ids = token_ids[: len(self.token_ids)]

    def first(self, number: int) -> Drafts:
        """Returns the first `number` tokens."""
        if number >= len(self.token_ids):
            return self
        return Drafts(self.token_ids[:number], None if self.parents is None else self.parents[:number])

    def main_path(self, depth: int) -> Drafts:
        """Returns the chain of first children, at most `depth` tokens."""
        if self.parents is None:
            return self.first(depth)
        path: list[int] = []
        last = -1
        for node, parent in enumerate(self.parents):
            if len(path) == depth:
                break
            if parent == last:
                path.append(self.token_ids[node])
                last = node
        return Drafts(path)

    def within(self, depth: int) -> Drafts:
        """Returns the tokens whose depth after the last committed token is at most `depth`."""
        if self.parents is None:
            return self.first(depth)
        depths = depths_of(self.parents)
        return self._where(lambda node: depths[node] <= depth)

    def below(self, vocab_size: int) -> Drafts:
        """Returns the tokens that are in the vocabulary, without descendants of other tokens."""
        if max(self.token_ids, default=0) < vocab_size:
            return self
        return self._where(lambda node: self.token_ids[node] < vocab_size)

    def among(self, nodes: Collection[int]) -> Drafts:
        """Returns `nodes`, without those that have an ancestor outside `nodes`."""
        return self._where(lambda node: node in nodes)

    def after(self, token_ids: Sequence[int]) -> Drafts | None:
        """Returns the drafts that follow the committed `token_ids`; None if the drafts do not begin with these."""
        num_committed = len(token_ids)
        if num_committed == 0:
            return self
        if self.parents is None:
            if num_committed > len(self.token_ids) or any(map(ne, self.token_ids, token_ids)):
                return None
            return Drafts(self.token_ids[num_committed:])
        node = self._walk(token_ids)
        if node is None:
            return None
        return self._below(node)

    def main_path_outcome(self, chosen: Sequence[int]) -> tuple[int, int]:
        """Returns the outcome of the chain of first children: its number of tokens, and how many were accepted.

        Leading tokens are accepted if they equal the tokens `chosen` by the target. The last chosen token is the bonus
        token.
        """
        if self.parents is None:
            return len(self.token_ids), len(chosen) - 1
        first_child: dict[int, int] = {}
        for node, parent in enumerate(self.parents):
            first_child.setdefault(parent, node)
        length, num_accepted, node = 0, 0, -1
        while node in first_child:
            node = first_child[node]
            if num_accepted == length < len(chosen) and self.token_ids[node] == chosen[length]:
                num_accepted += 1
            length += 1
        return length, num_accepted

    def _walk(self, token_ids: Sequence[int]) -> int | None:
        """Returns the node at the end of the path `token_ids`; None if the tree lacks this path."""
        assert self.parents is not None
        last, num_found = -1, 0
        for node, parent in enumerate(self.parents):  # a node comes after its parent
            if num_found == len(token_ids):
                break
            if parent == last and self.token_ids[node] == token_ids[num_found]:
                last, num_found = node, num_found + 1
        return last if num_found == len(token_ids) else None

    def _below(self, root: int) -> Drafts:
        """Returns the descendants of `root`, as drafts after `root`."""
        assert self.parents is not None
        return self._chosen(descendants_of(root, self.parents), root)

    def _where(self, is_kept: Callable[[int], bool]) -> Drafts:
        """Returns the nodes for which `is_kept` returns True, without descendants of other nodes."""
        parents = chain(len(self)) if self.parents is None else self.parents
        kept: set[int] = {-1}
        kept.update(node for node, parent in enumerate(parents) if parent in kept and is_kept(node))
        return Drafts(self.token_ids, parents)._chosen(sorted(kept - {-1}), -1)

    def _chosen(self, nodes: Sequence[int], root: int) -> Drafts:
        assert self.parents is not None
        token_ids = [self.token_ids[node] for node in nodes]
        return Drafts.tree(token_ids, renumbered(nodes, self.parents, root))

    @classmethod
    def tree(cls, token_ids: Sequence[int], parents: Sequence[int]) -> Drafts:
        """Returns drafts with `parents`; a chain if these form one."""
        return cls(token_ids, None if is_chain(parents) else parents)


NO_DRAFTS = Drafts()


def chain(length: int, start: int = 0) -> list[int]:
    """Returns the parents of a chain of `length` nodes whose first has the index `start`."""
    return list(range(start - 1, start + length - 1))


def is_chain(parents: Sequence[int], start: int = 0) -> bool:
    return list(parents) == chain(len(parents), start)


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """Returns the nodes from a root to `node`, inclusive; an empty list for -1."""
    path = []
    while node >= 0:
        path.append(node)
        parent = parents[node]
        assert -1 <= parent < node, f"node {node} has parent {parent}"
        node = parent
    return path[::-1]


def depths_of(parents: Sequence[int]) -> list[int]:
    """Returns the depth of each node; 1 for a root."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return depths


def descendants_of(root: int, parents: Sequence[int]) -> list[int]:
    """Returns the nodes below `root`, in their order; all nodes for -1."""
    found, nodes = {root}, []
    for node in range(root + 1, len(parents)):
        if parents[node] in found:
            found.add(node)
            nodes.append(node)
    return nodes


def renumbered(nodes: Sequence[int], parents: Sequence[int], root: int) -> list[int]:
    """Returns the parents, by new index, of the tree that consists of `nodes`; children of `root` become roots."""
    new = {root: -1} | {node: index for index, node in enumerate(nodes)}
    return [new[parents[node]] for node in nodes]
