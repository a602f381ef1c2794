"""Text to tokens and back, and chat templates: what needs a model's vocabulary only. Safe from any thread."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cellama.config import limits
from cellama.engine.errors import InvalidRequest, TemplateFailed
from cellama.engine.grammar.schema import prepare_schema
from cellama.engine.request import CONSTRAINTS, sampling_of
from cellama.engine.text.chat_options import ChatOptions, ChatPrompt, grammar_of_calls, reply_format_of
from cellama.engine.text.chat_template import ChatTemplate, Message, Rendered, after_reply
from cellama.engine.text.formats.call_grammar import TextConstraint

from .sources import HubOptions, resolve

_MAX_PREPARED = 256  # schemas of tools, those used last: an agent sends the same with every request

if TYPE_CHECKING:
    from cellama.engine.llama import LlamaModel


_prepared = functools.lru_cache(maxsize=_MAX_PREPARED)(prepare_schema)


def wanted_text(given: Mapping[str, Any], defaults: Mapping[str, Any], options: ChatOptions) -> TextConstraint | None:
    """What sampling parameters say of a chat's text: those given, and a model's defaults. Raises InvalidRequest.

    A forced call takes the place of the defaults.
    """
    sampling = sampling_of(given, {} if options.forces_call else defaults)
    kind = next((name for name in CONSTRAINTS if getattr(sampling, name) is not None), None)
    return None if kind is None else TextConstraint(kind, getattr(sampling, kind), sampling.strict_schema)


class Texts:
    """The text side of a model."""

    def __init__(self, name: str, weights: LlamaModel, *, control_tokens_in_text: bool = False) -> None:
        """With `control_tokens_in_text` what reads like a control token in a message is one, whoever wrote it;
        else only the template writes any."""
        self._name = name
        self._weights = weights
        self._control_tokens_in_text = control_tokens_in_text

    @functools.cached_property
    def template(self) -> ChatTemplate:
        """The model's own chat template. Raises TemplateFailed if it has none, or one that does not compile."""
        weights, source = self._weights, self._weights.chat_template
        if source is None:
            raise TemplateFailed(
                f"model {self._name!r} has no chat template; use `generate` with a prompt, or a model made for chat"
            )
        bos, eos = weights.special_text("bos"), weights.special_text("eos")
        specials = weights.special_tokens
        return ChatTemplate(
            source,
            bos=bos,
            eos=eos,
            specials=specials,
            ends=[special.text for special in specials if weights.is_end(special.id)],
            mark=not self._control_tokens_in_text,
        )

    @functools.cached_property
    def follows_replies(self) -> bool:
        """Whether messages can be put after a reply that is there, token by token."""
        try:
            after_reply([{"role": "user", "content": "."}], self.template.render)
        except TemplateFailed:
            return False
        return True

    def _close_template(self) -> None:
        template = self.__dict__.get("template")
        if template is not None:
            template.close()

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the token ids of a text. `parse_special` parses the text of special tokens as these tokens."""
        return self._weights.tokenize(text, add_special=add_special, parse_special=parse_special)

    def tokens_of(self, texts: Iterable[str | Sequence[int]]) -> list[list[int]]:
        """Return the token ids of each text. Lists of token ids stay unchanged. Raises InvalidRequest."""
        return [self.tokenize(text) if isinstance(text, str) else self._known(text) for text in texts]

    def _known(self, tokens: Iterable[int]) -> list[int]:
        ids, n_vocab = list(tokens), self._weights.info.n_vocab
        if not all(0 <= token < n_vocab for token in ids):
            raise InvalidRequest(f"there are token ids outside 0..{n_vocab - 1}")
        return ids

    def detokenize(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens. Control tokens have none. Raises InvalidRequest."""
        ids = self._known(tokens)
        with self._weights.lifetime:
            return b"".join(self._weights.token_bytes(token) for token in ids).decode(errors="replace")

    def render_chat(self, /, messages: Sequence[Message], **template_args: Any) -> str:
        """Return the prompt of a conversation (see ChatTemplate.render). Raises TemplateFailed."""
        return self.template.render(messages, **template_args).text

    def tokenize_chat(self, /, messages: Sequence[Message], **template_args: Any) -> list[int]:
        """Return the token ids of a conversation's prompt. The chat template writes all special tokens."""
        return self._tokens_of_prompt(self.template.render(messages, **template_args))

    def _tokens_of_prompt(self, prompt: Rendered) -> list[int]:
        weights, tokens = self._weights, self._tokens_after(prompt)
        bos = weights.special_text("bos")
        if bos and prompt.marked.startswith(bos):
            return tokens
        begin, end = weights.around
        return [*begin, *tokens, *end]

    def prepare_chat(
        self,
        messages: Sequence[Message],
        options: ChatOptions,
        *,
        follows_reply: bool = False,
        add_generation_prompt: bool = True,
        wanted: TextConstraint | None = None,
    ) -> ChatPrompt:
        """Return a conversation's prompt, and the format of the reply. Raises TemplateFailed, InvalidRequest.

        `wanted` is the constraint on the text of the reply (`wanted_text`).

        With `follows_reply`, the messages follow a reply that is in the context already, so the prompt continues after
        it, and the system message and tools of the context stay in effect. Without `add_generation_prompt`, the prompt
        ends with the last message and does not start a reply.
        """
        variables = {**options.variables, "add_generation_prompt": add_generation_prompt}
        if follows_reply:
            prompt = self._render_after_reply(messages, options, variables)
        else:
            prompt = self.template.render(options.all_of(messages), **variables)
        reply = reply_format_of(self._name, self.template, prompt, options, self._ids_of_markup)
        grammar = grammar_of_calls(self._name, reply, options, _prepared, wanted)
        tokens = self._tokens_after(prompt) if follows_reply else self._tokens_of_prompt(prompt)
        if grammar is None:
            return ChatPrompt(prompt.text, tokens, reply)
        lark = grammar.write()
        if len(lark) > limits.MAX_LARK_CHARS:
            raise InvalidRequest(
                f"tools: the grammar of their calls has {len(lark)} characters, and the limit is "
                f"{limits.MAX_LARK_CHARS}; send fewer tools, or shorter schemas"
            )
        bound = replace(reply, bound_at_start=True, has_bound_calls=True, is_call=options.forces_call)
        return ChatPrompt(prompt.text, tokens, bound, lark=lark, warnings=tuple(grammar.warnings))

    def _render_after_reply(
        self, messages: Sequence[Message], options: ChatOptions, variables: dict[str, Any]
    ) -> Rendered:
        if options.system is not None or any(message.get("role") == "system" for message in messages[:1]):
            raise InvalidRequest("a system message can't follow a reply: leave it out, the conversation keeps its own")
        return after_reply(messages, lambda all_: self.template.render(all_, **variables))

    def _tokens_after(self, prompt: Rendered) -> list[int]:
        return self._weights.tokenize_marked(prompt.text, prompt.marked, self.template.markup)

    def _ids_of_markup(self, text: str) -> list[int]:
        return self.tokenize(text, add_special=False, parse_special=True)


class Tokenizer(Texts):
    """A model's vocabulary and template without its weights: loaded in moments, no engine.

    Use as a context manager, or close it.
    """

    def __init__(self, source: str, hub: HubOptions | None = None) -> None:
        """Raises ModelLoadFailed."""
        from cellama.engine.llama import LlamaModel

        super().__init__(source, LlamaModel(resolve(source, hub or HubOptions()), vocab_only=True))

    def close(self) -> None:
        """Frees its memory. Idempotent."""
        self._close_template()
        self._weights.close()

    def __enter__(self) -> Tokenizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
