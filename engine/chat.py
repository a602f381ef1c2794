"""Chat templates: messages → the prompt text that the model was trained on. Sandboxed: templates come with models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import TemplateFailed

Message = Mapping[str, Any]


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: object, indent: int | None = None, ensure_ascii: bool = False, **_: object) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class ChatTemplate:
    """A model's own Jinja template. Rendering is safe from any thread."""

    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        """Compiles the template. Raises TemplateFailed."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals.update(raise_exception=_raise, strftime_now=_now, bos_token=bos, eos_token=eos)
        environment.filters["tojson"] = _to_json
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateFailed(f"the model's chat template does not compile: {error}") from None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_args: Any,
    ) -> str:
        """The prompt of a conversation, with its special tokens as text. Raises TemplateFailed.

        `template_args` are the template's own variables, for instance `enable_thinking`.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                **template_args,
            )
        except jinja2.TemplateError as error:
            raise TemplateFailed(f"the model's chat template refused the messages: {error}") from None
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise TemplateFailed(f"the model's chat template failed on the messages: {error!r}") from None
