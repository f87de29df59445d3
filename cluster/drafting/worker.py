"""The draft worker's loop: one drafter serves the sequences of many links and runs ahead while targets verify."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from operator import itemgetter

from cluster.config.speculation import window_of
from cluster.drafters.base import Drafter
from cluster.drafting.context_tuning import ContextTuning
from cluster.drafting.entries import CoordinatorLink, Deliver, Entry, Sent
from cluster.drafting.run_ahead import MAX_NODES_AHEAD, MAX_SEQUENCES_AHEAD, RunAhead, num_nodes_ahead, runs_ahead
from cluster.drafting.spelling import Spelling
from cluster.drafting.temperature_tuning import TemperatureTuning
from cluster.speculation.learned_curve import LearnedCurve
from cluster.telemetry.metrics import Reading, StepTime
from cluster.wire.messages import Advance, Open, SpeculateReply, SpeculateRequest

logger = logging.getLogger(__name__)

MAX_STEPS_WITHOUT_NEW = 16  # consecutive steps that may leave out new sequences while other proposals are owed
_SILENT_SECONDS = 0.5  # maximum time between two replies with step times, if there is nothing else to send
_NEWS_SECONDS = 0.001  # pause between two messages of early drafts, which each take 0.1 ms to write and read
_MAX_CONTEXTS = 16  # maximum length of a sequence, in contexts of the draft model: tokens take memory
_MAX_STEP_ROWS = 4096  # largest step whose time is learned; further rows add little
_BRANCHING_SHARE = 0.8  # share of the KV blocks in use above which no new branches start


class DraftWorker:
    """Drafts in its own thread or, if not started, in the thread that calls `step`.

    A turn of the loop handles new requests, and answers the requests whose proposals running ahead has completed. Then
    it runs one step of the drafter, for owed proposals and to run ahead, and sends the complete proposals in one
    message per link. Without work the thread sleeps.
    """

    def __init__(
        self,
        drafter: Drafter,
        run_ahead_branches: int = 0,
        *,
        tunes_temperature: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        prepare_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """`prepare_thread`: called in the new thread before the loop."""
        self.run_ahead = RunAhead(run_ahead_branches)
        self._drafter = drafter
        self._spelling = Spelling(drafter)
        self._clock = clock
        self._prepare_thread = prepare_thread
        self._curve = LearnedCurve(_MAX_STEP_ROWS)  # times of the drafter's steps, by rows
        self._contexts = None
        if drafter.context_tokens == "auto":
            self._contexts = ContextTuning(drafter.max_model_len, drafter.prompt_seconds)
        self._tuning = TemperatureTuning() if tunes_temperature else None
        self._entries: dict[tuple[int, int], Entry] = {}
        self._links: dict[int, CoordinatorLink] = {}
        self._num_links_ever = 0
        self._num_kept_drafts = 0
        self._num_wasted_drafts = 0
        self._num_steps_without_new = 0  # consecutive steps that left new sequences out
        # Link, request (None: the link is gone) and time of arrival.
        self._inbox: list[tuple[int, SpeculateRequest | None, float]] = []
        self._wake = threading.Condition()
        self._stopping = False
        # Seconds that the loop may sleep unless a request arrives; None: indefinitely.
        self.idle_seconds: float | None = 0.0
        self._rest_seconds: float | None = None  # seconds until running ahead may resume; None: after the next request
        self._thread = threading.Thread(target=self._run, name="draft-worker", daemon=True)
        self.step_time = StepTime()
        self.seconds_of = {"due": 0.0, "ahead": 0.0, "prompts": 0.0}  # time of steps by the work of their rows
        self.error: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the loop after the step that is running."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    @property
    def is_one_pass(self) -> bool:
        """True if one step drafts all tokens of a proposal."""
        return self._drafter.is_one_pass

    @property
    def num_sequences(self) -> int:
        return len(self._entries)

    @property
    def has_work(self) -> bool:
        """True if there is an unread request, or a proposal is due."""
        return bool(self._inbox) or any(entry.owes_proposal for entry in self._entries.values())

    @property
    def is_drafting(self) -> bool:
        """True if a proposal is due and its prompt is computed. Only the thread that calls `step` may read it."""
        return any(entry.owes_proposal and entry.is_computed for entry in self._entries.values())

    def readings(self) -> Iterator[Reading]:
        """Yields the metrics, except for those of the drafter's KV cache. Thread-safe."""
        yield Reading("outrider_draft_sequences", "Sequences with drafts.", self.num_sequences)
        yield from self.run_ahead.readings()
        if self._tuning is not None:
            yield from self._tuning.readings()
        if self._contexts is not None:
            yield from self._contexts.readings()
        yield from self._spelling.readings()
        yield from self.step_time.readings("outrider_draft_step", "Steps of the drafter")
        what = "Time of the drafter's steps, divided by their rows: due proposals, running ahead, prompts."
        for work, seconds in self.seconds_of.items():
            yield Reading("outrider_draft_seconds", what, seconds, is_counter=True, labels={"work": work})
        what = "Drafted tokens, by whether the target chose them; those of a sequence's last round count as wasted."
        for outcome, number in (("committed", self._num_kept_drafts), ("wasted", self._num_wasted_drafts)):
            yield Reading("outrider_draft_tokens", what, number, is_counter=True, labels={"outcome": outcome})

    # Called from the links' threads.

    def attach(self, deliver: Deliver) -> int:
        """Adds a link whose replies are passed to `deliver`. Returns its number."""
        with self._wake:
            self._num_links_ever += 1
            self._links[self._num_links_ever] = CoordinatorLink(deliver, self._clock())
            return self._num_links_ever

    def receive(self, link: int, request: SpeculateRequest, num_bytes: int = 0) -> None:
        """Queues `request` of `link`. `num_bytes`: its size on the wire."""
        with self._wake:
            now = self._clock()
            if link in self._links:
                self._links[link].received_at = now
                self._links[link].num_waiting_bytes += num_bytes
            self._inbox.append((link, request, now))
            self._wake.notify()

    def num_waiting_bytes(self, link: int) -> int:
        """Returns the size in bytes of the requests of `link` that the loop has not taken yet."""
        known = self._links.get(link)
        return 0 if known is None else known.num_waiting_bytes

    def detach(self, link: int) -> None:
        """Removes `link` and all its sequences."""
        with self._wake:
            self._links.pop(link, None)
            self._inbox.append((link, None, self._clock()))
            self._wake.notify()

    # The loop's thread.

    def _run(self) -> None:
        try:
            self._prepare_thread()
            while not self._stopping:
                self._sleep_until_asked()
                self.step()
        except BaseException as error:
            # The process must not look healthy after its loop has ended: its main program watches `error`.
            self.error = error
            logger.exception("the drafting loop ended")

    def _sleep_until_asked(self) -> None:
        with self._wake:
            if self.idle_seconds != 0.0:
                self._wake.wait_for(lambda: self._inbox or self._stopping, self.idle_seconds)

    def step(self) -> None:
        """Runs one turn of the loop."""
        self.take_in()
        self._draft()

    def take_in(self) -> None:
        """Handles the requests that arrived, and answers those whose proposals are already complete."""
        replies: dict[int, SpeculateReply] = {}
        for link, request, arrived_at in self._take_inbox():
            reply = replies.setdefault(link, SpeculateReply())
            if request is None:
                self._release_link(link)
                continue
            known = self._links.get(link)
            if known is not None and request.advances:
                known.advanced(arrived_at)
            self._apply(link, request, reply)
        # Proposals that running ahead has completed need not wait for another step.
        self._collect_proposals(replies)
        self._send(replies)

    def _draft(self) -> None:
        """Runs one step of the drafter, for owed proposals and to run ahead; sends the completed proposals."""
        batch = self._next_batch()
        replies: dict[int, SpeculateReply] = {}
        if not batch:
            self._collect_news(replies)
            self._send(replies)
            return
        first_for = {entry.link for entry in batch if not entry.sequence.parents}
        rows = [self._num_rows(entry, entry.sequence.to_extend or [entry.sequence.tip]) for entry in batch]
        num_rows = sum(rows)
        num_drafting = sum([number for entry, number in zip(batch, rows, strict=True) if entry.is_computed])
        num_due = sum([self._num_rows(entry, entry.lacks or ()) for entry in batch if entry.is_computed])
        started_at = self._clock()
        stuck = self._drafter.draft([entry.sequence for entry in batch])
        seconds = self._clock() - started_at
        num_step_rows = max(self._drafter.num_step_rows or num_rows, num_drafting)
        for work, number in (
            ("due", num_due),
            ("ahead", num_drafting - num_due),
            ("prompts", num_step_rows - num_drafting),
        ):
            self.seconds_of[work] += seconds * number / num_step_rows
        self._record_step(batch, num_rows, seconds, first_for)
        for entry in batch:
            entry.lacks = None
            if entry.context is not None:
                entry.context.num_steps += 1
            if entry.sequence.parents or (entry.sequence.is_exhausted and not entry.sequence.lacks_states):
                entry.is_computed, entry.is_behind = True, False
        for entry in [entry for entry in batch if entry.sequence in stuck]:
            self._release(entry)
            replies.setdefault(entry.link, SpeculateReply()).refused.add(entry.wire_id)
        self._collect_proposals(replies)
        self._collect_news(replies)
        # Report the step times even without a proposal: if the draft is slower than the target, each proposal is
        # outdated before it is complete.
        for number in {entry.link for entry in batch} - replies.keys():
            replies[number] = SpeculateReply()
        self._send(replies)

    def _send(self, replies: dict[int, SpeculateReply]) -> None:
        now = self._clock()
        for number, reply in replies.items():
            link = self._links.get(number)
            if link is not None and (reply or now > link.answered_at + _SILENT_SECONDS):
                link.answered_at = now
                reply.timing = link.timing(now)
                reply.credit, reply.max_tokens_read = self._drafter.free_tokens, self._drafter.max_tokens_read
                link.deliver(reply)

    def _record_step(self, batch: Sequence[Entry], num_rows: int, seconds: float, first_for: Container[int]) -> None:
        """Records a step of `batch` that took `seconds`.

        `first_for`: links with a sequence that began a proposal in the step.
        """
        self.step_time.add(seconds)
        if not all(entry.is_computed and not entry.is_behind for entry in batch):
            return  # the step includes a prompt or the tokens of several rounds, so it does not predict a round
        self._curve.observe(num_rows, seconds)
        if self._contexts is not None:
            num_read = sum([entry.sequence.num_committed - entry.sequence.num_skipped for entry in batch])
            self._contexts.observe_step(num_rows, num_read, seconds)
        num_rows = self._drafter.num_step_rows or num_rows
        for number, count in Counter(entry.link for entry in batch).items():
            link = self._links.get(number)
            if link is not None:
                link.step_seconds, link.batch, link.is_first = seconds, count, number in first_for
                link.rows = max(1, round(num_rows * count / len(batch)))

    def _take_inbox(self) -> list[tuple[int, SpeculateRequest | None, float]]:
        with self._wake:
            inbox, self._inbox = self._inbox, []
            for link, *_ in inbox:
                if link in self._links:
                    self._links[link].num_waiting_bytes = 0
        return inbox

    def _next_batch(self) -> list[Entry]:
        """Returns the sequences of the next step: those with owed proposals, and those that run ahead.

        The first step of a new sequence computes its prompt, so it is long and delays all sequences in the step. The
        target computes the prompt at the same time, so a new sequence can wait: it is left out while other proposals
        are owed, for at most `MAX_STEPS_WITHOUT_NEW` steps in a row.
        """
        limit = self._drafter.max_model_len
        urgent = [entry for entry in self._entries.values() if entry.owes_proposal and not entry.has_proposal(limit)]
        known = [entry for entry in urgent if entry.is_computed]
        self.idle_seconds = 0.0
        if len(known) < len(urgent):
            if not known or self._num_steps_without_new >= MAX_STEPS_WITHOUT_NEW:
                self._num_steps_without_new = 0
                for entry in urgent:
                    entry.sequence.to_extend = entry.lacks or []
                return urgent
            self._num_steps_without_new += 1
        else:
            self._num_steps_without_new = 0
        batch = {entry: list(entry.lacks or ()) for entry in known}
        num_rows = sum([self._num_rows(entry, nodes) for entry, nodes in batch.items()])
        for entry, node in self._nodes_ahead(batch, num_rows):
            batch.setdefault(entry, []).append(node)
        for entry, nodes in batch.items():
            entry.sequence.to_extend = nodes
        if not batch:
            self.idle_seconds = self._rest_seconds
        return list(batch)

    def _nodes_ahead(self, owed: Mapping[Entry, Sequence[int]], num_rows: int) -> list[tuple[Entry, int]]:
        """Returns the likeliest nodes to draft ahead in a step that has `num_rows` rows for owed proposals."""
        self._rest_seconds = None
        if not self._runs_ahead:
            return []
        limit = self._drafter.max_model_len
        lists = [
            entry.ahead(self.run_ahead, entry.sequence.room(limit), owed.get(entry, ()))
            for entry in self._entries.values()
            if entry.is_computed and entry.runs_ahead and not entry.sequence.is_exhausted
        ]
        found = list(itertools.islice(heapq.merge(*lists, key=itemgetter(0), reverse=True), MAX_NODES_AHEAD))
        rows = [self._drafter.num_rows(entry.sequence, node) for _, entry, node in found]
        now, chances = self._clock(), [chance for chance, *_ in found]
        expected = [link.outcome_in(now) for link in tuple(self._links.values())]  # a copy: links come and go
        seconds, rest = min(expected, key=itemgetter(0), default=(math.inf, None))
        taken = num_nodes_ahead(chances, rows, sum(map(len, owed.values())), num_rows, self._curve, seconds)
        self._rest_seconds = rest if found and not taken else None
        return [(entry, node) for _, entry, node in found[:taken]]

    def _num_rows(self, entry: Entry, nodes: Sequence[int]) -> int:
        """Returns the rows of a step that extends a sequence at `nodes`."""
        if not self.is_one_pass:
            return len(nodes)
        return sum([self._drafter.num_rows(entry.sequence, node) for node in nodes])

    @property
    def _runs_ahead(self) -> bool:
        return len(self._entries) <= MAX_SEQUENCES_AHEAD

    @property
    def _may_branch(self) -> bool:
        """True if sequences run ahead and enough KV blocks are free for branches."""
        num_blocks = self._drafter.num_blocks
        has_blocks = not num_blocks or self._drafter.num_used_blocks < _BRANCHING_SHARE * num_blocks
        return has_blocks and self._runs_ahead

    def _collect_proposals(self, replies: dict[int, SpeculateReply]) -> None:
        limit = self._drafter.max_model_len
        for entry in self._entries.values():
            if entry.owes_proposal and entry.has_proposal(limit):
                entry.owes_proposal = False
                replies.setdefault(entry.link, SpeculateReply()).add(entry.proposal())

    def _collect_news(self, replies: dict[int, SpeculateReply]) -> None:
        """Adds early drafts to existing replies, and to new replies on links without a recent message.

        An idle worker sends early drafts on all links.
        """
        latest = self._clock() - (_NEWS_SECONDS if self.idle_seconds == 0.0 else 0.0)
        for entry in self._entries.values():
            link = self._links.get(entry.link) if entry.has_news else None
            if link is not None and (entry.link in replies or link.answered_at <= latest):
                replies.setdefault(entry.link, SpeculateReply()).add(entry.news())

    def _apply(self, link: int, request: SpeculateRequest, reply: SpeculateReply) -> None:
        # Closing sequences makes room for new ones.
        for wire_id in request.closes:
            entry = self._entries.get((link, wire_id))
            if entry is not None:
                self._release(entry)
        for opening in request.opens.values():
            if opening.wire_id not in request.closes and not self._open(link, opening):
                reply.refused.add(opening.wire_id)
        for advance in request.advances.values():
            if advance.wire_id not in reply.refused and not self._advance(link, advance):
                reply.lost.add(advance.wire_id)

    def _open(self, link: int, opening: Open) -> bool:
        """Opens a sequence; replaces a sequence with the same ID. Returns False if the sequence cannot be opened.

        It cannot be opened if there is no room, or if the drafter cannot read the tokens of `opening`.
        """
        known = self._entries.get((link, opening.wire_id))
        if known is not None:
            self._release(known)
        sequence = self._spelling.open(opening)
        if sequence is None:
            return False
        entry = Entry(opening.wire_id, link, sequence, opening.window, sequence.params, opening.takes_parts)
        self._want(entry, opening)
        if self._contexts is not None:
            entry.context = self._contexts.choose(len(sequence.token_ids), self._round_seconds)
            sequence.context_tokens = entry.context.context_tokens
        if not self._drafter.admit(sequence):
            return False
        if entry.context is not None:
            entry.context.was_admitted(len(sequence.token_ids), sequence.num_skipped)
        self._entries[link, opening.wire_id] = entry
        return True

    def _advance(self, link: int, advance: Advance) -> bool:
        """Applies `advance`. Returns False if the sequence is lost, so that the coordinator must open it again.

        A sequence is lost if this worker lacks the sequence, a token before the base of `advance`, or a token of the
        vocabulary. It is also lost if it is longer than `_MAX_CONTEXTS` contexts.
        """
        entry = self._entries.get((link, advance.wire_id))
        if entry is None:
            return False
        sequence = entry.sequence
        is_too_long = advance.base + len(advance.token_ids) > _MAX_CONTEXTS * self._drafter.max_model_len
        if is_too_long or sequence.is_behind(advance.base) or not self._spelling.knows(advance.token_ids):
            self._release(entry)
            return False
        advance, num_added = self._spelling.advance(sequence, advance)
        news = advance.token_ids[sequence.base - advance.base :]
        if self._contexts is not None and news and sequence.num_owed:
            self._contexts.observe_outcome(entry.context, sequence.num_owed, *entry.tested(news))
        outcome = None
        if not entry.owes_proposal:
            outcome = self._outcome(entry, advance)
            if self._tuning is not None:
                self._tuning.learn(entry, advance)
        num_drafts, num_committed, num_skipped = len(sequence.parents), sequence.num_committed, sequence.num_skipped
        kept = sequence.commit(advance.base, advance.token_ids, num_added)
        if kept is not None:
            entry.is_behind |= sequence.num_committed - num_committed > sequence.num_owed + 1
            entry.frontier, entry.sent = None, Sent()
            self._num_kept_drafts += len(kept) - len(sequence.parents)
            self._num_wasted_drafts += num_drafts - len(kept)
            self._drafter.rewind(sequence, kept)
            entry.is_behind |= sequence.num_skipped != num_skipped
            self._want(entry, advance)
            entry.owes_proposal, entry.lacks = True, None
            if outcome is not None:
                self.run_ahead.count(outcome, is_hit=entry.has_proposal(self._drafter.max_model_len))
        return True

    def _outcome(self, entry: Entry, advance: Advance) -> str | None:
        """Returns the outcome of the last proposal; None if `advance` has no new tokens or nothing ran ahead.

        Must be called before `advance` is applied.
        """
        sequence = entry.sequence
        news = advance.token_ids[sequence.base - advance.base :]
        if not news or not runs_ahead(sequence):
            return None
        return self.run_ahead.observe(sequence, news)

    @property
    def _round_seconds(self) -> float:
        """Returns the mean time of a round of the links, over the number of sequences; 0 if unknown."""
        known = [link.round_seconds for link in tuple(self._links.values()) if link.round_seconds is not None]
        return sum(known) / len(known) / max(1, len(self._entries)) if known else 0.0

    def _want(self, entry: Entry, wanted: Open | Advance) -> None:
        """Applies the number of drafts and the shape that `wanted` requests to further proposals."""
        sequence = entry.sequence
        sequence.window = window_of(wanted.num_owed, entry.granted_window)
        sequence.num_owed = wanted.num_owed
        sequence.shape = wanted.shape
        sequence.width = self.run_ahead.width(sequence, may_branch=self._may_branch)

    def _release(self, entry: Entry) -> None:
        del self._entries[entry.link, entry.wire_id]
        self._num_wasted_drafts += len(entry.sequence.parents)
        if self._contexts is not None:
            self._contexts.observe_end(entry.context)
        self._drafter.release(entry.sequence)

    def release_all(self) -> None:
        """Frees the memory of all sequences, after the loop has ended. Raises the drafter's exceptions."""
        for entry in tuple(self._entries.values()):
            self._release(entry)

    def _release_link(self, link: int) -> None:
        for entry in [entry for entry in self._entries.values() if entry.link == link]:
            self._release(entry)
