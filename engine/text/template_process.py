"""Render one chat template in a separate process, which `chat_template.py` starts from this file.

Templates come from models, and their variables come from jobs. Malicious templates or variables can make rendering run
forever, fill the memory, or hold the GIL in one long call. A separate process protects other jobs from malicious
templates and variables. The process starts quickly because it imports only the standard library and Jinja.

The process reads one JSON object per line, and responds to each object with another JSON object. The first line
contains `source`, `bos`, `eos`, `control`, `markup`, `from_caller` and `cpu_s`. Every other line contains `messages`,
`variables` and `mark`. The response contains either `text` and `marked` (see `CallerMasks`), or `error` and `kind`. The
kind is "invalid" if the request is at fault, "refused" if the template raised an error, or otherwise "failed". A
request with `probes` contains several conversations, keyed by name. The response to this request contains `texts`,
which maps each name to a text, or to null if the template can't render the conversation.
"""

from __future__ import annotations

import functools
import json
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARS = 1 << 24  # maximum length of a prompt in characters: more than any context holds
MAX_PROBE_CHARS = 1 << 17  # maximum length of a probe's prompt in characters, because `derivation` compares all of them
THINKING = frozenset({"<think>", "</think>", "[THINK]", "[/THINK]"})  # these tags enclose reasoning in messages
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_COMMON = frozenset("_-./:,;'\"!?()")  # occur in ordinary words, so masking them could change the template's output
_MASKS = range(0x1D800, 0x1DA00)  # SignWriting: rare, and printable, because Python's repr escapes other characters


class Invalid(Exception):
    """Raised if no template can render the request."""


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: object, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    separators = options.get("separators")
    return json.dumps(
        value,
        indent=indent,
        ensure_ascii=ensure_ascii,
        separators=None if separators is None else tuple(separators),
        default=list,  # the filters `map` and `select` return generators
        sort_keys=bool(options.get("sort_keys")),
    )


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class _Generation(jinja2.ext.Extension):
    """The tags `{% generation %}…{% endgeneration %}`, which mark training text and have no effect here."""

    tags = {"generation"}  # noqa: RUF012  (as in the base class)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(bos: str, eos: str) -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.globals.update(raise_exception=_raise, strftime_now=_now, bos_token=bos, eos_token=eos)
    return environment


class CallerMasks:
    """Finds the characters of a prompt that come from the caller, regardless of how the template changed them.

    The template renders the conversation a second time. For the second rendering, each character in the caller's
    strings that distinguishes control tokens from words, such as `<` or `|`, is replaced by a different character,
    called a mask. If the two prompts are identical except for the masks, each mask is at the position of a caller's
    character.
    """

    def __init__(self, tree: nodes.Template, source: str, control: Sequence[str], markup: Sequence[str]) -> None:
        """Prepare masks for the texts of control tokens (`control`) and of other tokens in the template (`markup`)."""
        self._literals = [text for text in {*control, *markup} if text.strip()]
        self._joined_literals = "\n".join(self._literals)
        self._maskable = sorted({char for text in self._literals for char in text if not char.isspace()})
        self._markup_chars = {char for char in self._maskable if not char.isalnum()} - _COMMON
        self._word_literals = [text for text in self._literals if not self._markup_chars & set(text)]
        names = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)} | ROLES
        names |= {node.attr for node in tree.find_all(nodes.Getattr)}
        self._template_names = {
            text
            for text in names
            if text.replace("_", "").replace("-", "").isalnum()
            and not any(word in text for word in self._word_literals)
        }
        turns = [text for text in control if text not in THINKING]
        compared = {
            text
            for text in _compared_texts(tree)
            if self._markup_chars & set(text) and not any(turn in text for turn in turns)
        }
        self._compared = re.compile("|".join(map(re.escape, sorted(compared, key=len, reverse=True))) or "(?!)")
        self._template_chars = set(source)

    def choose(self, strings: Iterable[str]) -> dict[int, int]:
        """Return a mask for each maskable character. No mask occurs in the strings or in the template."""
        used = self._template_chars.union(*map(set, strings))
        free = [code for code in _MASKS if chr(code) not in used]
        return dict(zip(map(ord, self._maskable), free[: len(self._maskable)], strict=True))

    def mask(self, text: str, masks: Mapping[int, int]) -> str:
        """Return one of the caller's strings, with masks in place of its maskable characters."""
        if text in self._template_names:  # the template may compare it, and writes the markup around a role itself
            return text
        if text in self._joined_literals and not self._markup_chars & set(text):  # the template may complete this word
            return text.translate(masks)
        for word in self._word_literals:
            text = text.replace(word, word.translate(masks))
        return text.translate({ord(char): masks[ord(char)] for char in self._markup_chars})

    def mask_except_compared(self, text: str, masks: Mapping[int, int]) -> str:
        """Mask a string, except for texts that the template looks for, such as the end of reasoning."""
        pieces, at = [], 0
        for found in self._compared.finditer(text):
            pieces += [self.mask(text[at : found.start()], masks), found[0]]
            at = found.end()
        return "".join([*pieces, self.mask(text[at:], masks)])

    def conflict(self, prompt: str, strings: Sequence[str]) -> str | None:
        """Return a control token in the prompt that may come partly from the caller's strings, or None."""
        found = [literal for literal in self._literals if literal in prompt]
        return next((literal for literal in found if any(self._contributes(text, literal) for text in strings)), None)

    def _contributes(self, text: str, literal: str) -> bool:
        """Return True if a string contains the literal, or starts or ends with a part of the literal.

        The part must contain markup characters.
        """
        if literal in text or (text in literal and self._markup_chars & set(text)):
            return True
        return any(
            (text.endswith(literal[:cut]) and self._markup_chars & set(literal[:cut]))
            or (text.startswith(literal[cut:]) and self._markup_chars & set(literal[cut:]))
            for cut in range(1, len(literal))
        )


def _compared_texts(tree: nodes.Template) -> set[str]:
    """Return the texts that a template uses to compare, split or otherwise examine strings."""
    users = tree.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test))
    return {c.value for user in users for c in user.find_all(nodes.Const) if isinstance(c.value, str) and c.value}


def _strings_of(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _strings_of(part)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return the JSON value with `change` applied to all strings, including keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _mapped(part, change) for key, part in value.items()}
    return [_mapped(part, change) for part in value] if isinstance(value, list) else value


class Renderer:
    """Renders one compiled template."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        environment = _environment(setup["bos"], setup["eos"])
        environment.filters["tojson"] = self._to_json
        self._current_masks: Iterable[int] = ()  # the masks in the strings that are being rendered
        source = setup["source"]
        self._template = environment.from_string(source)
        self._masks = CallerMasks(environment.parse(source), source, setup["control"], setup["markup"])
        self._from_caller = setup["from_caller"]

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response to a request. Raises Invalid or any error from the template."""
        if "probes" in request:
            return {"texts": {name: self._probe(probe) for name, probe in request["probes"].items()}}
        messages = request["messages"]
        text = self._render(messages, request["variables"])
        if not request["mark"]:
            return {"text": text, "marked": text}
        return {"text": text, "marked": self._marked(text, messages, request["variables"])}

    def _probe(self, probe: Mapping[str, Any]) -> str | None:
        """Return the prompt of a probe, or None if the template can't render it or its prompt is too long."""
        text = self._attempt(probe["messages"], probe["variables"], ())
        return text if 0 < len(text) <= MAX_PROBE_CHARS else None

    def _to_json(self, value: object, *arguments: Any, **options: Any) -> str:
        """Return a value as JSON. Masks are not escaped, because they represent ASCII characters."""
        text = _to_json(value, *arguments, **options)
        if not text.isascii():
            return text
        for mask in self._current_masks:
            text = text.replace(json.dumps(chr(mask))[1:-1], chr(mask))
        return text

    def _render(self, messages: Any, variables: Any) -> str:
        text: str = self._template.render({**variables, "messages": messages})  # a dict, so that any names are allowed
        if len(text) > MAX_CHARS:
            raise jinja2.TemplateError(f"the prompt is too long: {len(text)} characters (limit {MAX_CHARS})")
        return text

    def _marked(self, text: str, messages: list[Any], variables: dict[str, Any]) -> str:
        given = [messages, list(variables.values())]
        strings = list(_strings_of(given))
        masks = self._masks.choose(strings)
        for mask_text in (self._masks.mask, self._masks.mask_except_compared):
            changed = _mapped(given, functools.partial(mask_text, masks=masks))
            if changed == given:
                return text
            masked = self._attempt(changed[0], dict(zip(variables, changed[1], strict=True)), masks.values())
            if masked.translate({mask: char for char, mask in masks.items()}) == text:
                return masked.translate(dict.fromkeys(masks.values(), self._from_caller))
        conflict = self._masks.conflict(text, strings)
        if conflict is not None:
            raise Invalid(
                f"the messages contain {conflict!r} or a part of it, which the model's chat template handles as one of "
                "its own control tokens; remove it, or set control_tokens_in_text for this model"
            )
        return text

    def _attempt(self, messages: Any, variables: Any, masks: Iterable[int]) -> str:
        """Return the prompt for masked strings, or an empty string if the template rejects them."""
        self._current_masks = masks
        try:
            return self._render(messages, variables)
        except Exception:  # a template is untrusted code, and the prompt without masks could be rendered
            return ""
        finally:
            self._current_masks = ()


def _answer(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return work()
    except Invalid as error:
        return {"error": str(error), "kind": "invalid"}
    except jinja2.TemplateError as error:
        return {"error": str(error), "kind": "refused"}
    except MemoryError:
        return {"error": "not enough memory", "kind": "failed"}
    except Exception as error:  # a template is untrusted code
        return {"error": repr(error)[:1000], "kind": "failed"}


def _limit_cpu(seconds: float) -> None:
    """Make the operating system end the process after this many seconds of CPU time. 0 removes the limit.

    A Python signal handler would have to wait for a long call to return.
    """
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    """Handle requests until stdin is closed."""
    setup = json.loads(sys.stdin.readline())
    renderers: list[Renderer] = []

    def compile_template() -> dict[str, Any]:
        renderers.append(Renderer(setup))
        return {}

    _serve(setup["cpu_s"], compile_template)
    for line in sys.stdin:
        _serve(setup["cpu_s"], functools.partial(renderers[0].answer, json.loads(line)))


def _serve(cpu_s: float, work: Callable[[], dict[str, Any]]) -> None:
    _limit_cpu(cpu_s)
    answer = json.dumps(_answer(work))
    _limit_cpu(0)
    sys.stdout.write(answer + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
