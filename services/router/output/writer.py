"""Writes the tokens of one choice as pieces of text, up to its first stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cluster.logprobs import TokenLogprobs
from cluster.tokenization import IncrementalDetokenizer, Tokenizer
from cluster.wire.replies import RoundCounts
from services.router.http.large_work import run_in_thread_if_large
from services.router.output.accepted_drafts import answer_rounds
from services.router.output.message import Reader
from services.router.output.piece import Piece
from services.router.output.source import Said
from services.router.output.stop import StopMatcher, StopStrings


@dataclass(frozen=True)
class TextFormat:
    """Settings for converting the tokens of a request's choices to text."""

    tokenizer: Tokenizer
    stop_strings: StopStrings
    skip_special_tokens: bool
    end_token_ids: frozenset[int]  # tokens that end a sequence and are not part of its text
    stop_token_ids: frozenset[int]  # end tokens that the request named
    min_tokens: int = 0  # number of tokens before stop strings take effect
    has_no_tokens: bool = False  # drops the only token, because the request asks for none
    shown_special_tokens: Collection[int] = ()  # special tokens that are kept even if others are skipped
    has_rounds: bool = False  # whether pieces report the round of each token
    reader: Reader | None = None  # reader of a chat whose answers have reasoning or calls


class ChoiceWriter:
    def __init__(self, form: TextFormat, echo: str = "") -> None:
        """`echo`: the text that the first piece begins with."""
        self.num_tokens = 0
        self.echo = echo
        self._form = form
        self._detokenizer = IncrementalDetokenizer(
            form.tokenizer, skip_special_tokens=form.skip_special_tokens, shown=form.shown_special_tokens
        )
        self._matcher = StopMatcher(form.stop_strings) if form.stop_strings else None
        self._reader = form.reader.start() if form.reader is not None else None
        self._texts: list[str] = []  # texts of the last piece's tokens, if rounds are reported

    def write(
        self,
        token_ids: Sequence[int],
        finish_reason: str | None,
        logprobs: TokenLogprobs | None,
        rounds: Sequence[RoundCounts] = (),
    ) -> Piece:
        """Returns the piece for `token_ids`, without tokens after a stop string.

        `finish_reason`: finish reason of the choice if these are its last tokens, else None.
        """
        if self._form.has_no_tokens:
            self.num_tokens += len(token_ids)
            return Piece("", (), "length", logprobs=None if logprobs is None else logprobs.part(0, 0))
        spelled: Sequence[int] = token_ids
        if finish_reason == "stop" and token_ids and token_ids[-1] in self._form.end_token_ids:
            spelled = token_ids[:-1]
        piece = self._plain(spelled, finish_reason) if self._matcher is None else self._matched(spelled, finish_reason)
        if len(piece.token_ids) == len(spelled):
            piece.token_ids = token_ids
            if finish_reason == "stop" and token_ids and token_ids[-1] in self._form.stop_token_ids:
                piece.stop_reason = piece.stop_reason or token_ids[-1]
        if logprobs is not None:
            piece.logprobs = logprobs.part(0, len(piece.token_ids))
        if self._form.has_rounds:
            unspelled = [""] * (len(piece.token_ids) - len(self._texts))
            piece.rounds = list(answer_rounds([*self._texts, *unspelled], rounds))
        self.num_tokens += len(piece.token_ids)
        return piece

    async def num_reasoning_tokens(self) -> int:
        """Returns the number of tokens of the reasoning, at most that of the whole answer."""
        text = "" if self._reader is None else self._reader.reasoning_text
        if not text:
            return 0
        token_ids = await run_in_thread_if_large(
            len(text), lambda: self._form.tokenizer.encode(text, add_special_tokens=False)
        )
        return min(len(token_ids), self.num_tokens)

    def _plain(self, token_ids: Sequence[int], finish_reason: str | None) -> Piece:
        if self._form.has_rounds:
            self._texts = [self._detokenizer.push([token_id]) for token_id in token_ids]
            text = "".join(self._texts)
        else:
            text = self._detokenizer.push(token_ids)
        if finish_reason is not None:
            text += self._flush()
        if self._reader is None:
            return Piece(text, token_ids, finish_reason)
        said = self._reader.push(text, is_last=finish_reason is not None)
        return Piece("", token_ids, finish_reason, said=said)

    def _flush(self) -> str:
        rest = self._detokenizer.flush()
        if self._texts:
            self._texts[-1] += rest
        return rest

    def _matched(self, token_ids: Sequence[int], finish_reason: str | None) -> Piece:
        # Takes the tokens one by one, so that the last token does not depend on how many arrived at once.
        assert self._matcher is not None
        said, self._texts = list[Said](), []
        for num_tokens, token_id in enumerate(token_ids, start=1):
            spelled = self._detokenizer.push([token_id])
            self._texts.append(spelled)
            own = self._read(spelled)
            said += own if self.num_tokens + num_tokens <= self._form.min_tokens else self._cut(own)
            if self._matcher.stopped_at is not None:
                return self._piece(said, token_ids[:num_tokens], "stop")
        if finish_reason is not None:
            said += self._cut(self._read(self._flush(), is_last=True))
            said.append(Said("content", self._matcher.flush()))
        return self._piece(said, token_ids, finish_reason if self._matcher.stopped_at is None else "stop")

    def _read(self, text: str, *, is_last: bool = False) -> list[Said]:
        if self._reader is None:
            return [Said("content", text)]
        return self._reader.push(text, is_last=is_last)

    def _cut(self, said: Sequence[Said]) -> list[Said]:
        """Returns `said` without content that may begin a stop string, or that follows one."""
        assert self._matcher is not None
        held = "" if self._reader is None else self._reader.held_content
        kept: list[Said] = []
        for one in said:
            if one.kind != "content":
                kept += [Said("content", self._matcher.flush()), one]
                continue
            kept.append(Said("content", self._matcher.push(one.text)))
            if self._matcher.stopped_at is not None:
                return kept
        if held and self._matcher.would_stop(held):
            kept.append(Said("content", self._matcher.push(held)))
        return kept

    def _piece(self, said: Sequence[Said], token_ids: Sequence[int], finish_reason: str | None) -> Piece:
        assert self._matcher is not None
        text = "".join(one.text for one in said) if self._reader is None else ""
        kept = () if self._reader is None else [one for one in said if one.text or one.kind != "content"]
        return Piece(text, token_ids, finish_reason, stop_reason=self._matcher.stopped_at, said=kept)
