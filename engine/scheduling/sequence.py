"""One request's tokens and progress."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from cellama.engine.backend import AdapterSet, Chunk, key_of
from cellama.engine.events import CacheTier, Completion, Context, FinishReason, RequestTimings, RequestUsage
from cellama.engine.kvcache.disk_tier import LoadWait
from cellama.engine.kvcache.manager import WORTH_SAVING_TOKENS
from cellama.engine.kvcache.ram_tier import StateNote
from cellama.engine.kvstore.benefit import reuse_probability
from cellama.engine.kvstore.states import StateMatch
from cellama.engine.logprobs import TokenLogprob
from cellama.engine.request import Request
from cellama.engine.text.detokenizer import TextStream
from cellama.engine.text.formats.calls import ParsedToolCall
from cellama.engine.text.reply_reader import ReplyPart, ReplyReader, open_reply

if TYPE_CHECKING:
    from cellama.engine.backend import Sampler


GROWTH = 4 / 3  # times as long as at its last copy is a running sequence copied again: each token is copied 4 times


class State(Enum):
    """Where a sequence is. Only the scheduler changes it; a preempted one waits again."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """A request with its tokens. Owned by the engine thread; `state`, `slot` and `num_computed` by the scheduler.

    Times are `time.monotonic()` seconds.
    """

    request: Request
    seed: int
    submitted_at: float
    tokens: list[int]  # prompt, then output
    index: int = 0  # among the n completions of its request
    adapters: AdapterSet = ()
    identity: bytes = b""  # of the backend: what its cells depend on
    state: State = State.WAITING
    slot: int | None = None
    rank: float = 0.0  # in the waiting queue: smaller is sooner
    order: int = 0  # of arrival, among equal ranks
    match: StateMatch | None = None  # a file of states that has its beginning; None once it was looked at
    file_wait: LoadWait | None = None  # for that file
    num_kept: int = 0  # tokens that it had when its state was last copied for the folder
    waits_for: tuple[Sequence, int] | None = None  # another one's prefill of so many tokens, which they share
    cuts: tuple[int, ...] = ()  # lengths at which its prefill stops for a checkpoint, ascending
    num_computed: int = 0  # leading tokens whose KV cells are filled
    num_cached: int = 0  # of the prompt, reused instead of computed when it first got a slot
    cache_tier: CacheTier | None = None  # where these were; None: nowhere
    num_drafted: int = 0  # tokens that were guessed and decoded before they were chosen …
    num_accepted: int = 0  # … of which so many were chosen
    failures_alone: int = 0  # decode calls in a row that failed with nothing else in the batch
    sampler: Sampler | None = None
    taken_at: float = 0.0  # when the engine was given the request
    held_since: float | None = None  # waiting for a prefix that another one computes
    prefix_wait_s: float = 0.0  # before that
    admitted_at: float | None = None  # the first time
    placed_at: float | None = None  # the last time …
    num_output_placed: int = 0  # … with so much output
    first_token_at: float | None = None
    last_token_at: float | None = None
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)  # the reasoning, apart from the text
    tool_calls: tuple[ParsedToolCall, ...] = ()
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of the output tokens, if asked for
    text_stream: TextStream = field(init=False)
    reply: ReplyReader | None = field(init=False)  # of a chat
    mirostat_mu: float | None = None  # that its sampler begins with
    num_reported: int = 0  # output tokens that Text events have carried

    def __post_init__(self) -> None:
        self.text_stream = TextStream(self.request.stop)
        self.reply = None if self.request.reply is None else open_reply(self.request.reply)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def is_as_predicted(self) -> bool:
        """True while the last token of its output is the one that was predicted there."""
        at = self.num_output - 1
        return at < len(self.request.prediction) and self.tokens[-1] == self.request.prediction[at]

    @property
    def num_pending(self) -> int:
        """Tokens that still have to be decoded before the next one can be sampled."""
        return len(self.tokens) - self.num_computed

    @property
    def num_until_cut(self) -> int:
        """Of these, those before the next cut."""
        return next((cut for cut in self.cuts if cut > self.num_computed), len(self.tokens)) - self.num_computed

    @property
    def scope(self) -> Hashable:
        """Only sequences of the same scope take over each other's states: cells depend on the adapters."""
        if not self.request.cache_prompt:
            return id(self)
        return (self.request.cache_scope, key_of(self.adapters)) if self.adapters else self.request.cache_scope

    @property
    def deadline(self) -> float | None:
        timeout_s = self.request.timeout_s
        return None if timeout_s is None else self.submitted_at + timeout_s

    def cut_back(self, num_tokens: int) -> None:
        """Note that its slot holds no more than so many of its tokens; it computes the others again."""
        if num_tokens < self.num_computed:
            self.num_computed = num_tokens
            if self.num_pending > 1:
                self.state = State.PREFILLING

    @property
    def is_worth_keeping(self) -> bool:
        """True if its state is for a request that goes on from there: not of bulk work, unless it was read for that."""
        return self.request.is_interactive or self.request.prefill_only

    @property
    def note(self) -> StateNote:
        """What the cache needs to know of its state when it ends."""
        pending = self.tokens[self.num_computed :]
        return StateNote(
            next_token=pending[0] if len(pending) == 1 else None,
            reuse_probability=reuse_probability(
                is_prefill=self.request.prefill_only,
                has_shared=self.num_cached >= WORTH_SAVING_TOKENS,
                is_chat=self.request.reply is not None,
            ),
        )

    @property
    def is_due_to_be_copied(self) -> bool:
        """True if it has read its prompt, or grown much since its state was last copied."""
        least = max(WORTH_SAVING_TOKENS, GROWTH * max(self.num_kept, self.num_cached))
        return self.state is State.DECODING and self.request.cache_prompt and self.num_computed >= least

    def keep(self, parts: list[ReplyPart]) -> None:
        """Add final parts of the reply to the completion."""
        self.texts += [part.text for part in parts if part.kind == "text"]
        self.thoughts += [part.text for part in parts if part.kind == "reasoning"]

    @property
    def reasoning(self) -> str | None:
        """What the model has thought so far, None if nothing."""
        return "".join(self.thoughts) or None

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
        """Its tokens so far, and what was taken over."""
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

    def note_prefix_wait(self, is_held: bool, now: float) -> None:
        """Note whether it waits for a prefix from now on."""
        if is_held:
            self.held_since = now if self.held_since is None else self.held_since
        elif self.held_since is not None:
            self.prefix_wait_s, self.held_since = self.prefix_wait_s + now - self.held_since, None


class SlotWork(NamedTuple):
    """What a step computes in a slot: a chunk, and its sequence."""

    sequence: Sequence
    chunk: Chunk


def work_of(sequence: Sequence, count: int) -> SlotWork:
    """Return the next `count` tokens of a sequence that has a slot."""
    assert sequence.slot is not None
    start = sequence.num_computed
    tokens = sequence.tokens[start : start + count]
    decode = sequence.state is State.DECODING
    chunk = Chunk(sequence.slot, start, tokens, samples=count == sequence.num_pending, decode=decode)
    return SlotWork(sequence, chunk)
