"""What becomes of sampled tokens: text that is final, parts of a reply, and the events that tell of them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from cellama.engine.backend import Vocabulary
from cellama.engine.events import Event, Text
from cellama.engine.scheduling.sequence import Sequence
from cellama.engine.text.detokenizer import StopMatch
from cellama.engine.text.reply_reader import Kind, ReplyPart

from .handle import Handle

log = logging.getLogger(__name__)

HELD_BACK_TOKENS = 16  # tokens without final text that are reported without it: another worker would compute them again

Listener = Callable[[tuple[Event, ...]], None]


class EventOutput:
    """Turns the tokens of sequences into events, and hands those out together. Engine thread only."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.listeners: list[Listener] = []
        self._vocabulary = vocabulary
        self._events: list[Event] = []

    def append(self, handle: Handle, sequence: Sequence, token: int) -> str | None:
        """Tells what is final with one more token of a sequence; returns the stop string that ends it."""
        released = self._text_after(sequence, token)
        if isinstance(released, StopMatch):
            self._release(handle, sequence, released.released)
            return released.stop
        self._release(handle, sequence, released)
        return None

    def replay(self, sequence: Sequence, tokens: tuple[int, ...]) -> str | None:
        """As `append` of all of these, which were told before: nothing is told again."""
        for token in tokens:
            released = self._text_after(sequence, token)
            text = released.released if isinstance(released, StopMatch) else released
            sequence.keep([ReplyPart("text", text)] if sequence.reply is None else sequence.reply.push(text))
            if isinstance(released, StopMatch):
                return released.stop
        return None

    def finish(self, handle: Handle, sequence: Sequence, *, stopped: bool, cut: bool) -> None:
        """Tells what was held back of a sequence that ends; `stopped` if a stop string cut that off.

        `cut` if the model would have written more.
        """
        if not stopped:
            self._release(handle, sequence, sequence.text_stream.flush())
        if sequence.reply is not None:
            parts, sequence.tool_calls = sequence.reply.finish(cut=cut)
            self._release_parts(handle, sequence, parts)

    def emit(self, handle: Handle, event: Event) -> None:
        """Gives an event to its request at once, and to the listeners with the next `flush`."""
        if self.listeners:
            self._events.append(event)
        handle.deliver(event)

    def flush(self) -> None:
        """Hands all new events to the listeners."""
        if not self._events:
            return
        events, self._events = tuple(self._events), []
        for listener in self.listeners:
            try:
                listener(events)
            except Exception:  # other people's code, on the engine thread
                log.exception("a listener failed; it is called again with the next events")

    def _text_after(self, sequence: Sequence, token: int) -> str | StopMatch:
        if sequence.reply is None:
            return sequence.text_stream.push(self._vocabulary.token_bytes(token))
        sequence.reply.note_token()
        shown = sequence.reply.text_of(token)
        return sequence.text_stream.push(self._vocabulary.token_bytes(token) if shown is None else shown)

    def _release(self, handle: Handle, sequence: Sequence, text: str) -> None:
        if sequence.reply is not None:
            parts = sequence.reply.push(text)
            if sequence.sampler is not None and sequence.reply.num_unbound is not None:
                sequence.sampler.bind()
            self._release_parts(handle, sequence, parts)
        elif text:
            sequence.texts.append(text)
            self._tell_text(handle, sequence, text, "text")

    def _release_parts(self, handle: Handle, sequence: Sequence, parts: list[ReplyPart]) -> None:
        """Tells what is final of a chat's reply; now and then also that it goes on, while a tool call is held back."""
        sequence.keep(parts)
        for part in parts:
            if part.kind == "reasoning_end":
                self._tell_text(handle, sequence, sequence.reasoning or "", part.kind)
            else:
                self._tell_text(handle, sequence, part.text, part.kind)
        if not parts and sequence.num_output - sequence.num_reported >= HELD_BACK_TOKENS:
            self._tell_text(handle, sequence, "", "text")

    def _tell_text(self, handle: Handle, sequence: Sequence, text: str, kind: Kind) -> None:
        if sequence.request.stream:
            first, sequence.num_reported = sequence.num_reported, sequence.num_output
            tokens = tuple(sequence.tokens[sequence.num_prompt + first :])
            logprobs = tuple(sequence.logprobs[first:]) if sequence.logprobs else ()
            mu = None if sequence.sampler is None else sequence.sampler.mirostat_mu
            event = Text(
                request_id=sequence.request.id,
                text=text,
                tokens=tokens,
                index=sequence.index,
                logprobs=logprobs,
                kind=kind,
                mirostat_mu=mu,
            )
            self.emit(handle, event)
