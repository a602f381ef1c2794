"""Sequences, which contain the tokens and progress of requests, and the slots that sequences occupy."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from cellama.engine.backend import AdapterSet, Chunk, key_of
from cellama.engine.events import CacheTier, Completion, Context, FinishReason, RequestTimings, RequestUsage
from cellama.engine.kvcache.disk_tier import LoadWait
from cellama.engine.kvcache.manager import MIN_SAVED_TOKENS
from cellama.engine.kvcache.ram_tier import StateNote
from cellama.engine.kvstore.benefit import reuse_probability
from cellama.engine.kvstore.states import StateMatch
from cellama.engine.request import Request, TokenLogprob
from cellama.engine.text.detokenizer import TextStream
from cellama.engine.text.formats.calls import ParsedToolCall
from cellama.engine.text.reply_reader import ReplyPart, ReplyReader, open_reply

if TYPE_CHECKING:
    from cellama.engine.backend import Sampler


from collections.abc import Iterator

GROWTH = 4 / 3  # growth after which a running sequence is copied again, so each token is copied about 4 times


class State(Enum):
    """The state of a sequence. Only the scheduler changes it. A preempted sequence returns to WAITING."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One completion of a request, with its tokens.

    The engine thread owns the sequence, and the scheduler owns `state`, `slot` and `num_computed`. All times are in
    seconds, as returned by `time.monotonic()`.
    """

    request: Request
    seed: int
    submitted_at: float
    tokens: list[int]  # prompt, then output
    index: int = 0  # number of this completion among the n of its request
    adapters: AdapterSet = ()
    identity: bytes = b""  # identity of the backend: the part of the context's key that the model determines
    state: State = State.WAITING
    slot: int | None = None
    rank: float = 0.0  # position in the waiting queue: smaller ranks come first
    order: int = 0  # order of arrival, among equal ranks
    match: StateMatch | None = None  # a stored state with a prefix of this sequence; None after it has been used
    file_wait: LoadWait | None = None  # the wait for that state to be read
    num_stored: int = 0  # number of tokens when its state was last copied for the disk
    waits_for: tuple[Sequence, int] | None = None  # a prefilling sequence, and the length of the prefix that they share
    cuts: tuple[int, ...] = ()  # lengths at which its prefill stops for a checkpoint, ascending
    num_computed: int = 0  # leading tokens whose KV cells are filled
    num_cached: int = 0  # prompt tokens that were reused when it first got a slot
    cache_tier: CacheTier | None = None  # tier of the reused tokens; None if there are none
    num_drafted: int = 0  # draft tokens that were decoded
    num_accepted: int = 0  # draft tokens that were accepted
    failures_alone: int = 0  # consecutive decode calls that failed with nothing else in the batch
    sampler: Sampler | None = None
    received_at: float = 0.0  # time at which the engine received the request
    prefix_wait_since: float | None = None  # start of its current wait for a prefix
    prefix_wait_s: float = 0.0  # duration of its earlier waits for prefixes
    admitted_at: float | None = None  # time at which it first got a slot
    placed_at: float | None = None  # time at which it last got a slot
    num_output_placed: int = 0  # number of output tokens at that time
    num_reused: int = 0  # leading tokens that it reused at that time
    charged: float = 0.0  # cost of its tokens since that time that its fairness key was charged (shares.py)
    first_token_at: float | None = None
    last_token_at: float | None = None
    texts: list[str] = field(default_factory=list)
    reasoning_texts: list[str] = field(default_factory=list)
    tool_calls: tuple[ParsedToolCall, ...] = ()
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one entry per output token, if requested
    text_stream: TextStream = field(init=False)
    reply: ReplyReader | None = field(init=False)  # parser of the reply to a chat
    mirostat_mu: float | None = None  # initial state of mirostat in its sampler
    num_reported: int = 0  # output tokens that Text events have reported

    def __post_init__(self) -> None:
        self.text_stream = TextStream(self.request.stop, keeps_stop=self.request.include_stop_str_in_output)
        self.reply = None if self.request.reply is None else open_reply(self.request.reply)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def matches_prediction(self) -> bool:
        """Return whether the last output token matches the token at the same position of the request's prediction."""
        at = self.num_output - 1
        return at < len(self.request.prediction) and self.tokens[-1] == self.request.prediction[at]

    @property
    def num_pending(self) -> int:
        """The number of tokens that must be decoded before the next token can be sampled."""
        return len(self.tokens) - self.num_computed

    @property
    def num_until_cut(self) -> int:
        """The number of pending tokens before the next cut, or all pending tokens if there is no further cut."""
        return next((cut for cut in self.cuts if cut > self.num_computed), len(self.tokens)) - self.num_computed

    @property
    def scope(self) -> Hashable:
        """The reuse scope, which includes the adapters. Sequences with different scopes never share states."""
        if not self.request.cache_prompt:
            return id(self)
        return (self.request.cache_scope, key_of(self.adapters)) if self.adapters else self.request.cache_scope

    @property
    def deadline(self) -> float | None:
        timeout_s = self.request.timeout_s
        return None if timeout_s is None else self.submitted_at + timeout_s

    def take_uncharged(self, *, is_leaving: bool = False) -> float:
        """Return the sequence's cost since the last call, measured in generated tokens, and mark this cost as charged.

        A generated token costs 1, a prefilled token costs the `prefill_cost` of the request's share, and a reused token
        is free. The whole prefill is charged as soon as the sequence gets a slot. If `is_leaving` is true, the sequence
        is losing its slot, so prefill tokens that were not computed are refunded.
        """
        num_known = self.num_prompt + self.num_output_placed
        num_prefilled = (min(self.num_computed, num_known) if is_leaving else num_known) - self.num_reused
        cost = self.num_output - self.num_output_placed + self.request.share.prefill_cost * max(0, num_prefilled)
        before, self.charged = self.charged, cost
        return cost - before

    def truncate(self, num_tokens: int) -> None:
        """Record that the slot holds at most this many tokens of the sequence.

        The sequence's other tokens must be computed again.
        """
        if num_tokens < self.num_computed:
            self.num_computed = num_tokens
            if self.num_pending > 1:
                self.state = State.PREFILLING

    @property
    def is_reusable(self) -> bool:
        """Return whether later requests may continue from this sequence's state.

        Only the states of interactive and prefill-only requests are reusable.
        """
        return self.request.is_interactive or self.request.prefill_only

    @property
    def note(self) -> StateNote:
        """The properties of the sequence that the cache stores together with the sequence's state."""
        pending = self.tokens[self.num_computed :]
        return StateNote(
            next_token=pending[0] if len(pending) == 1 else None,
            reuse_probability=reuse_probability(
                is_prefill=self.request.prefill_only,
                has_shared=self.num_cached >= MIN_SAVED_TOKENS,
                is_chat=self.request.reply is not None,
            ),
        )

    @property
    def needs_copy(self) -> bool:
        """Return whether the sequence has finished its prefill, or has grown a lot since its state was last copied.

        States below MIN_SAVED_TOKENS tokens, and states of requests that don't use the cache, are never copied.
        """
        min_tokens = max(MIN_SAVED_TOKENS, GROWTH * max(self.num_stored, self.num_cached))
        return self.state is State.DECODING and self.request.cache_prompt and self.num_computed >= min_tokens

    def add_parts(self, parts: list[ReplyPart]) -> None:
        """Add finished parts of the reply to the completion."""
        self.texts += [part.text for part in parts if part.kind == "text"]
        self.reasoning_texts += [part.text for part in parts if part.kind == "reasoning"]

    @property
    def reasoning(self) -> str | None:
        """The model's reasoning so far, or None if the model has not written any reasoning."""
        return "".join(self.reasoning_texts) or None

    def completion(self, reason: FinishReason, stop_sequence: str | None, timings: RequestTimings) -> Completion:
        tokens = tuple(self.tokens[self.num_prompt :])
        return Completion(
            text="".join(self.texts),
            tokens=tokens,
            finish_reason=reason,
            stop_sequence=stop_sequence,
            usage=self.usage,
            timings=timings,
            slot=self.slot,
            seed=self.seed,
            index=self.index,
            reasoning=self.reasoning,
            tool_calls=self.tool_calls,
            logprobs=None if self.request.sampling.logprobs is None else tuple(self.logprobs),
            mode=self.request.called_mode,
            context_tokens=tuple(self.tokens) if self.request.return_tokens and self.index == 0 else None,
            context=self._context(tokens) if self.request.cache_prompt else None,
            warnings=self.request.warnings,
        )

    @property
    def usage(self) -> RequestUsage:
        """The request's token counts so far, including reused tokens."""
        return RequestUsage(
            prompt_tokens=self.num_prompt,
            completion_tokens=self.num_output,
            cached_tokens=self.num_cached,
            cache_tier=self.cache_tier,
            accepted_prediction_tokens=self.num_accepted,
            rejected_prediction_tokens=self.num_drafted - self.num_accepted,
        )

    def _context(self, generated: tuple[int, ...]) -> Context:
        request = self.request
        return Context(self.identity, key_of(self.adapters), request.cache_scope, request.prompt, generated)

    def note_prefix_wait(self, is_waiting: bool, now: float) -> None:
        """Record whether the sequence is now waiting for a prefix, and add up the time that it has waited."""
        if is_waiting:
            self.prefix_wait_since = now if self.prefix_wait_since is None else self.prefix_wait_since
        elif self.prefix_wait_since is not None:
            self.prefix_wait_s, self.prefix_wait_since = self.prefix_wait_s + now - self.prefix_wait_since, None


class SlotWork(NamedTuple):
    """A sequence and the chunk that a step computes for it."""

    sequence: Sequence
    chunk: Chunk


def work_of(sequence: Sequence, count: int) -> SlotWork:
    """Return the work for the next `count` tokens of a sequence that has a slot."""
    assert sequence.slot is not None
    start = sequence.num_computed
    tokens = sequence.tokens[start : start + count]
    samples, decode = start + count == len(sequence.tokens), sequence.state is State.DECODING
    return SlotWork(sequence, Chunk(sequence.slot, start, tokens, samples, decode))


class SlotTable:
    """The sequence in each slot, or None for an idle slot. All components of the scheduler share one table.

    Every change replaces the lists below, which are in slot order. Callers must not modify these lists.
    """

    running: list[Sequence]  # sequences that have a slot
    busy: list[int]
    idle: list[int]
    num_bulk: int  # number of slots with bulk sequences
    has_protected: bool  # whether a slot has a protected sequence

    def __init__(self, num_slots: int) -> None:
        self._holders: list[Sequence | None] = [None] * num_slots
        self._note_change()

    def _note_change(self) -> None:
        holders = self._holders
        self.running = [holder for holder in holders if holder is not None]
        self.busy = [slot for slot, holder in enumerate(holders) if holder is not None]
        self.idle = [slot for slot, holder in enumerate(holders) if holder is None]
        self.num_bulk = sum([not holder.request.is_interactive for holder in self.running])
        self.has_protected = any(holder.request.is_protected for holder in self.running)

    def __getitem__(self, slot: int) -> Sequence | None:
        return self._holders[slot]

    def __iter__(self) -> Iterator[Sequence | None]:
        return iter(self._holders)

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def has_one_class(self) -> bool:
        """Whether the running sequences are all interactive, or all bulk."""
        return self.num_bulk in (0, len(self.running))

    def assign(self, slot: int, sequence: Sequence) -> None:
        """Assign an idle slot to a sequence."""
        self._holders[slot], sequence.slot = sequence, slot
        self._note_change()

    def release(self, sequence: Sequence) -> int:
        """Take the slot from a sequence and return the slot."""
        slot = sequence.slot
        assert slot is not None
        self._holders[slot], sequence.slot = None, None
        self._note_change()
        return slot

    def swap(self, slot: int, other: int) -> list[Sequence]:
        """Swap the sequences in two slots, either of which may be idle. Return the sequences that have moved."""
        self._holders[slot], self._holders[other] = self._holders[other], self._holders[slot]
        self._note_change()
        moved = []
        for index in (slot, other):
            if (holder := self._holders[index]) is not None:
                holder.slot = index
                moved.append(holder)
        return moved
