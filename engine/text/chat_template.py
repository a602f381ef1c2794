"""Chat templates, which render messages into the prompt text that the model was trained on."""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from cellama.config.logging import event_logger
from cellama.engine.errors import EngineStopped, InvalidRequest, TemplateFailed
from cellama.engine.system.confined import confine, describe_exit

from .derivation.message_order import MessageOrder, arrange, derive_order, is_plain, order_probes
from .derivation.probes import probes
from .derivation.reply_markup import ReplyMarkup, derive_markup
from .formats.channels import MARKUP
from .markup import FROM_CALLER, SpecialToken

log = event_logger(__name__)

CPU_S = 3.0  # CPU seconds per rendering, which usually takes a millisecond
WALL_S = 30.0  # seconds per rendering: ten times CPU_S, because the machine may be busy with other work
DATA_BYTES = 512 << 20  # memory of the process: Python, Jinja, and several copies of the longest prompt
MAX_ANSWER_BYTES = 256 << 20  # two prompts of the maximum length, in which each character is escaped
_PROGRAM = Path(__file__).with_name("template_process.py")

Message = Mapping[str, Any]
Render = Callable[..., "Rendered"]  # renders messages, as `ChatTemplate.render` does


@dataclass(frozen=True, slots=True)
class Rendered:
    """The rendered text of a prompt, including its control tokens.

    `marked` is the same text, in which FROM_CALLER replaces each of the caller's characters that could be part of
    markup.
    """

    text: str
    marked: str

    def until(self, reply: str) -> Rendered:
        """Return the prompt, truncated after the last occurrence of this reply.

        Trailing spaces in the reply are kept if the template keeps such spaces. Raises InvalidRequest if the prompt
        does not contain the reply.
        """
        found = self.text.rfind(reply.strip())
        if found < 0:
            raise InvalidRequest(
                "messages: the last message is from the assistant, but the chat template changes its content, so it "
                "can't be continued; end with a user message"
            )
        from_start = reply.lstrip()
        end = found + len(from_start if self.text.startswith(from_start, found) else reply.strip())
        return Rendered(self.text[:end], self.marked[:end])


class ChatTemplate:
    """A model's Jinja template.

    A separate process with limited CPU time and memory renders the template. `close` ends this process. Rendering is
    thread-safe.
    """

    def __init__(
        self,
        source: str,
        *,
        bos: str = "",
        eos: str = "",
        specials: Iterable[SpecialToken] = (),
        ends: Iterable[str] = (),
        mark: bool = True,
    ) -> None:
        """Compile the template.

        `specials` are the vocabulary's special tokens, and `ends` are the texts of the special tokens that end a reply.
        With `mark`, prompts also record which characters come from the caller. Raises TemplateFailed if the template
        does not compile.
        """
        specials = list(specials)
        self._control = {special.text: special.id for special in specials if special.is_control}
        self.source = source
        self.markup = frozenset(
            special.text
            for special in specials
            if not special.is_control and special.text.strip() and special.text in source
        )
        self._ends = {text for text in (*ends, eos) if text}
        self._mark = mark
        setup = {
            "source": source,
            "bos": bos,
            "eos": eos,
            "control": list(self._control),
            "markup": sorted(self.markup),
            "from_caller": FROM_CALLER,
        }
        self._process = TemplateProcess(setup)

    def render(
        self,
        /,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_args: Any,
    ) -> Rendered:
        """Render a conversation and return its prompt.

        Messages use OpenAI's format. An assistant message may also contain `reasoning`. Messages in an order that the
        template does not support are rearranged first (derivation/message_order.py). `template_args` sets template
        variables such as `enable_thinking`. Raises TemplateFailed or InvalidRequest.
        """
        variables = {**template_args, "add_generation_prompt": add_generation_prompt}
        if tools:  # undefined otherwise, because templates test whether there are tools
            variables["tools"] = list(tools)
        has_calls = any(message.get("tool_calls") for message in messages)
        as_text = has_calls and self.reply_markup.arguments_as_text
        prepared: list[Message] = [for_template(message, arguments_as_text=as_text) for message in messages]
        if not is_plain(prepared):
            prepared = arrange(prepared, self.message_order)
        answer = self._process.request({"messages": prepared, "variables": variables, "mark": self._mark})
        return Rendered(answer["text"], answer["marked"])

    @functools.cached_property
    def message_order(self) -> MessageOrder:
        """The message orders that the template supports, derived once like `reply_markup`.

        If the supported orders can't be derived, every order counts as supported, and messages keep the caller's order.
        """
        try:
            return derive_order(self._process.request({"probes": order_probes(for_template)})["texts"])
        except TemplateFailed as error:
            log.warning(
                "supported message orders not detected",
                error=str(error),
                detail="the chat template failed; messages keep the caller's order",
            )
            return MessageOrder(first_system=True, more_systems=True, repeated_roles=True)

    @functools.cached_property
    def reply_markup(self) -> ReplyMarkup:
        """The markup of reasoning and tool calls in replies.

        The markup is derived once, by rendering sample conversations. If rendering all of these conversations takes
        longer than the time limit for a single conversation, the markup is unknown.
        """
        try:
            rendered = self._process.request({"probes": probes(for_template)})["texts"]
        except TemplateFailed as error:
            log.warning(
                "reply markup not detected",
                error=str(error),
                detail="the chat template failed; reasoning and tool calls stay in the text",
            )
            rendered = {}
        return derive_markup(rendered, self.source, self._ends)

    @property
    def ends(self) -> Collection[str]:
        """The texts of the tokens that end a reply."""
        return self._ends

    @functools.cached_property
    def repeats_tools(self) -> bool:
        """True if the template describes the tools again after each reply.

        The value is derived once, like `reply_markup`.
        """
        name = "repeated_tool"
        probe = {"type": "function", "function": {"name": name, "description": "", "parameters": {}}}

        def render(messages: list[Message], **variables: Any) -> Rendered:
            return self.render(messages, tools=[probe], **variables)

        try:
            return name in after_reply([{"role": "user", "content": "."}], render).text
        except TemplateFailed:
            return False

    @property
    def supports_tools(self) -> bool:
        """True if the template includes tool descriptions in the prompt."""
        return "tools" in self.source

    @property
    def supports_thinking(self) -> bool:
        """True if reasoning in replies can be recognised."""
        markup = self.reply_markup
        return markup.channels or bool(markup.think_close)

    @functools.cached_property
    def thinking_tokens(self) -> tuple[tuple[int, bytes], ...]:
        """The ids and texts of the control tokens around reasoning."""
        markup = self.reply_markup
        return self._control_in(MARKUP if markup.channels else (markup.think_open, markup.think_close))

    @functools.cached_property
    def call_tokens(self) -> tuple[tuple[int, bytes], ...]:
        """The ids and texts of the control tokens in tool calls."""
        calls = self.reply_markup.calls
        return self._control_in(calls.literals if calls is not None else ())

    def _control_in(self, texts: Iterable[str]) -> tuple[tuple[int, bytes], ...]:
        joined = "\n".join(texts)
        return tuple((token, text.encode()) for text, token in self._control.items() if text and text in joined)

    def close(self) -> None:
        """End the template process. Repeated calls have no effect."""
        self._process.close()


def for_template(message: Any, *, arguments_as_text: bool = False) -> dict[str, Any]:
    """Return a message in the format that chat templates expect.

    The content is a string, tool call arguments are an object or JSON text, and reasoning is stored under the names
    that templates use. Raises InvalidRequest if the message is malformed.
    """
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"a message is {type(message).__name__}; it must be an object with role and content")
    prepared = {name: value for name, value in message.items() if value is not None and name != "signature"}
    prepared.setdefault("content", "")
    reasoning = prepared.pop("reasoning", None)
    if reasoning is not None:
        prepared["reasoning_content"] = prepared["thinking"] = reasoning
    if "tool_calls" in prepared:
        prepared["tool_calls"] = [_call_for_template(call, arguments_as_text) for call in prepared["tool_calls"]]
    return prepared


def _call_for_template(call: Any, arguments_as_text: bool) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise InvalidRequest("a tool call does not contain a function; add a function with a name and arguments")
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            raise InvalidRequest(
                f"the arguments of tool call {function.get('name')!r} are not valid JSON; "
                "omit the call if max_tokens truncated it"
            ) from None
    if arguments_as_text and "arguments" in function:
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    rest = {name: value for name, value in call.items() if name != "partial"}
    return {"type": "function", **rest, "function": function}


def after_reply(
    messages: Sequence[Message],
    render: Render,
    calls: Sequence[Mapping[str, Any]] = (),
    ends: Collection[str] = (),
) -> Rendered:
    """Return the text that a template writes after a reply when these messages follow the reply.

    The template renders a conversation whose reply is a random word. The result is everything after this word. If the
    reply contains tool calls, this word is the last argument of the last call, and the result starts after the markup
    of the calls. This markup ends before the first of the tokens that end a reply (`ends`). Raises TemplateFailed or
    InvalidRequest.
    """
    if not messages:
        raise InvalidRequest("messages is empty; with a parent_key, send the messages that follow the reply")
    word = f"reply{secrets.token_hex(16)}"
    turns: list[Message] = [{"role": "user", "content": "."}, _reply_of(word, calls)]
    failure = TemplateFailed(
        "the chat template does not reproduce replies unchanged, so no messages can follow a reply; send the whole "
        "conversation without parent_key"
    )
    system = {"role": "system", "content": "."}
    for conversation in (turns, [system, *turns]):  # some templates reject a system message, others require one
        try:
            prompt = render([*conversation, *messages])
            tail = _after_word(render(conversation, add_generation_prompt=False).text, word, ends) if calls else ""
        except TemplateFailed as error:
            failure = error
            continue
        if prompt.text.count(word) == 1 and tail is not None:
            at = prompt.text.index(word) + len(word)
            if prompt.text.startswith(tail, at):
                at += len(tail)
                return Rendered(prompt.text[at:], prompt.marked[at:])
    raise failure


def _reply_of(word: str, calls: Sequence[Mapping[str, Any]]) -> Message:
    """Return a reply that contains only a word.

    If the reply has tool calls, the last call's arguments contain the word.
    """
    if not calls:
        return {"role": "assistant", "content": word}
    arguments = [*["{}"] * (len(calls) - 1), json.dumps({"text": word})]
    shown = [
        {**call, "function": {"name": call["function"]["name"], "arguments": text}}
        for call, text in zip(calls, arguments, strict=True)
    ]
    return {"role": "assistant", "content": "", "tool_calls": shown}


def _after_word(text: str, word: str, ends: Collection[str]) -> str | None:
    """Return the text between the random word and the first token that ends a reply, or None if the word is missing."""
    _, found, tail = text.partition(word)
    return tail[: min((tail.index(end) for end in ends if end in tail), default=len(tail))] if found else None


class TemplateProcess:
    """A process that renders one template (template_process.py).

    The process handles one request at a time, and is restarted if it was killed. The process ends when `close` is
    called, when this object is deleted, or when the Python process exits. This class is thread-safe.
    """

    def __init__(self, setup: Mapping[str, Any]) -> None:
        """Start the process and compile the template.

        `setup` contains the fields of the first line sent to the process, except `cpu_s`. Raises TemplateFailed if the
        template does not compile.
        """
        self._setup = {**setup, "cpu_s": CPU_S}
        self._lock = threading.Lock()
        self._closed = False
        self._start()

    def request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request to the process and return the response.

        Raises TemplateFailed, InvalidRequest or EngineStopped.
        """
        try:
            line = json.dumps(request).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"messages or template_args are not valid JSON: {error}") from None
        with self._lock:
            if self._closed:
                raise EngineStopped("the chat template has been unloaded; load the model again")
            if not self._end.alive:
                self._start()
            answer = self._exchange(line)
        if "error" not in answer:
            return answer
        if answer["kind"] == "invalid":
            raise InvalidRequest(answer["error"])
        verb = "rejected" if answer["kind"] == "refused" else "failed on"
        raise TemplateFailed(f"the model's chat template {verb} the messages: {answer['error']}")

    def close(self) -> None:
        """End the process. Later requests fail. Repeated calls have no effect."""
        with self._lock:
            self._closed = True
            self._end()

    def _start(self) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the parent
            )
        except OSError as error:
            raise TemplateFailed(f"the process for the model's chat template can't be started: {error}") from None
        self._end = weakref.finalize(self, _end, self._process)
        confine(self._process.pid, data_bytes=DATA_BYTES)
        answer = self._exchange(json.dumps(self._setup).encode() + b"\n")
        if "error" in answer:
            self._end()
            raise TemplateFailed(f"the model's chat template does not compile: {answer['error']}")

    def _exchange(self, line: bytes) -> dict[str, Any]:
        """Send a line and return the response.

        If no response arrives in time, kill the process and raise TemplateFailed.
        """
        stdin, stdout = _pipes(self._process)
        timer = threading.Timer(WALL_S, self._process.kill)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # the process has ended, so `readline` returns nothing
                stdin.write(line)
                stdin.flush()
            answered = stdout.readline(MAX_ANSWER_BYTES)
        finally:
            timer.cancel()
        if not answered.endswith(b"\n"):
            self._end()
            raise TemplateFailed(
                f"the model's chat template took more than {CPU_S:g} s or too much memory "
                f"({describe_exit(self._process.returncode)}); shorten the conversation, or correct the template"
            )
        answer: dict[str, Any] = json.loads(answered)
        return answer


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in _pipes(process):
        with contextlib.suppress(OSError):  # closing flushes what the process has not read
            pipe.close()
