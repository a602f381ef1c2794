"""Renders one chat template in a process of its own, which `template_renderer.py` starts by this file's path.

Templates come with models, and their variables come with jobs. Either can make a template run forever, fill the memory,
or hold Python's lock in one long call. In a process of its own that costs no other job anything. Only the standard
library and Jinja are imported, so the process starts quickly.

It reads a JSON object per line and answers with one. The first has `source`, `bos`, `eos`, `control`, `markup` and
`cpu_s`; the others `messages`, `variables`, `mark`. The answer to these is `text` and `marked` (see `Masks`), or
`error` with `kind`: invalid (the request's fault), refused (by the template), failed. A request with `probes` has
several conversations by name; the answer is `texts`, with null for those that the template can't render.
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

MAX_CHARS = 1 << 24  # of a prompt: more than any context holds
MAX_PROBE_CHARS = 1 << 17  # of a probe, whose longest words have a dozen characters; `derivation` compares them all
THINKING = frozenset({"<think>", "</think>", "[THINK]", "[/THINK]"})  # in messages they enclose reasoning
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
FROM_CALLER = "\U0010ffff"  # stands in `marked` for a character that came from the caller and could be part of markup
_COMMON = frozenset("_-./:,;'\"!?()")  # also in ordinary words, so masking them could change what a template does
_MASKS = range(0x1D800, 0x1DA00)  # SignWriting: rare, and printable, because Python's repr escapes what is not


class Invalid(Exception):
    """The request can't be rendered by any template."""


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: object, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    separators = options.get("separators")
    return json.dumps(
        value,
        indent=indent,
        ensure_ascii=ensure_ascii,
        separators=None if separators is None else tuple(separators),
        default=list,  # what `map` and `select` make
        sort_keys=bool(options.get("sort_keys")),
    )


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`, which marks what a model is trained on and means nothing here."""

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


class Masks:
    """Shows which characters of a prompt come from the caller, whatever the template did with them.

    The template renders the conversation a second time, in which another character, the mask, stands for each
    character of the caller's strings that distinguishes a control token from words, such as `<` and `|`. If the two
    prompts are equal except for the masks, then each mask is where a character of the caller is.
    """

    def __init__(self, tree: nodes.Template, source: str, control: Sequence[str], markup: Sequence[str]) -> None:
        """`control` are the texts of control tokens, `markup` those of others that belong to the template's markup."""
        self._literals = [text for text in {*control, *markup} if text.strip()]
        self._fragments = "\n".join(self._literals)
        self._characters = sorted({char for text in self._literals for char in text if not char.isspace()})
        self._telling = {char for char in self._characters if not char.isalnum()} - _COMMON
        self._words = [
            text for text in self._literals if not self._telling & set(text)
        ]  # literals that look like words
        known = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)} | ROLES
        known |= {node.attr for node in tree.find_all(nodes.Getattr)}
        self._names = {
            text
            for text in known
            if text.replace("_", "").replace("-", "").isalnum() and not any(word in text for word in self._words)
        }
        turns = [text for text in control if text not in THINKING]
        sought = {text for text in _sought(tree) if self._telling & set(text) and not any(t in text for t in turns)}
        self._sought = re.compile("|".join(map(re.escape, sorted(sought, key=len, reverse=True))) or "(?!)")
        self._taken = set(source)

    def masks(self, strings: Iterable[str]) -> dict[int, int]:
        """Return a mask for each character of control tokens. No mask is in the strings or in the template."""
        taken = self._taken.union(*map(set, strings))
        free = [code for code in _MASKS if chr(code) not in taken]
        return dict(zip(map(ord, self._characters), free[: len(self._characters)], strict=True))

    def masked(self, text: str, masks: Mapping[int, int]) -> str:
        """Return a string of the caller with masks."""
        if text in self._names:  # the template may compare it, and what it writes around a role is its own
            return text
        if text in self._fragments and not self._telling & set(text):  # a word that the template may complete
            return text.translate(masks)
        for word in self._words:
            text = text.replace(word, word.translate(masks))
        return text.translate({ord(char): masks[ord(char)] for char in self._telling})

    def masked_except_sought(self, text: str, masks: Mapping[int, int]) -> str:
        """Return the string with masks, except where the template looks for a text, such as the end of reasoning."""
        pieces, at = [], 0
        for found in self._sought.finditer(text):
            pieces += [self.masked(text[at : found.start()], masks), found[0]]
            at = found.end()
        return "".join([*pieces, self.masked(text[at:], masks)])

    def suspect(self, prompt: str, strings: Sequence[str]) -> str | None:
        """Return a control token in the prompt that the caller's strings may have a part in."""
        found = [literal for literal in self._literals if literal in prompt]
        return next((literal for literal in found if any(self._takes_part(literal, text) for text in strings)), None)

    def _takes_part(self, literal: str, text: str) -> bool:
        """Return whether a string has the literal, or starts or ends with a telling part of it."""
        if literal in text or (text in literal and self._telling & set(text)):
            return True
        return any(
            (text.endswith(literal[:cut]) and self._telling & set(literal[:cut]))
            or (text.startswith(literal[cut:]) and self._telling & set(literal[cut:]))
            for cut in range(1, len(literal))
        )


def _sought(tree: nodes.Template) -> set[str]:
    """Return the texts that a template compares with, splits at, and so on."""
    users = tree.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test))
    return {c.value for user in users for c in user.find_all(nodes.Const) if isinstance(c.value, str) and c.value}


def _strings_of(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _strings_of(part)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return the JSON value with all its strings changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _mapped(part, change) for key, part in value.items()}
    return [_mapped(part, change) for part in value] if isinstance(value, list) else value


class Renderer:
    """One compiled template."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        environment = _environment(setup["bos"], setup["eos"])
        environment.filters["tojson"] = self._to_json
        self._used: Iterable[int] = ()  # the masks in what is rendered now
        source = setup["source"]
        self._template = environment.from_string(source)
        self._masks = Masks(environment.parse(source), source, setup["control"], setup["markup"])

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the prompt with and without marks. Raises Invalid, and any error of a template."""
        if "probes" in request:
            return {"texts": {name: self._probe(probe) for name, probe in request["probes"].items()}}
        messages = request["messages"]
        text = self._render(messages, request["variables"])
        if not request["mark"]:
            return {"text": text, "marked": text}
        return {"text": text, "marked": self._marked(text, messages, request["variables"])}

    def _probe(self, probe: Mapping[str, Any]) -> str | None:
        """Return the prompt of a probe; None if the template can't render it, or renders it at great length."""
        text = self._attempt(probe["messages"], probe["variables"], ())
        return text if 0 < len(text) <= MAX_PROBE_CHARS else None

    def _to_json(self, value: object, *arguments: Any, **options: Any) -> str:
        """Return the JSON of a value, without escapes for masks, because they stand for ASCII characters."""
        text = _to_json(value, *arguments, **options)
        if not text.isascii():
            return text
        for mask in self._used:
            text = text.replace(json.dumps(chr(mask))[1:-1], chr(mask))
        return text

    def _render(self, messages: Any, variables: Any) -> str:
        text: str = self._template.render({**variables, "messages": messages})  # whatever their names
        if len(text) > MAX_CHARS:
            raise jinja2.TemplateError(f"it makes too much: {len(text)} characters, the limit is {MAX_CHARS}")
        return text

    def _marked(self, text: str, messages: list[Any], variables: dict[str, Any]) -> str:
        given = [messages, list(variables.values())]
        strings = list(_strings_of(given))
        masks = self._masks.masks(strings)
        for masked in (self._masks.masked, self._masks.masked_except_sought):
            changed = _mapped(given, functools.partial(masked, masks=masks))
            if changed == given:
                return text
            found = self._attempt(changed[0], dict(zip(variables, changed[1], strict=True)), masks.values())
            if found.translate({mask: char for char, mask in masks.items()}) == text:
                return found.translate(dict.fromkeys(masks.values(), FROM_CALLER))
        suspect = self._masks.suspect(text, strings)
        if suspect is not None:
            raise Invalid(
                f"the messages contain {suspect!r}, or a part of it, and the model's chat template does with it what "
                "it does with its own control tokens; leave it out, or set control_tokens_in_text for this model"
            )
        return text

    def _attempt(self, messages: Any, variables: Any, masks: Iterable[int]) -> str:
        """Return the prompt of masked strings; nothing if the template rejects such strings."""
        self._used = masks
        try:
            return self._render(messages, variables)
        except Exception:  # a template is foreign code; the prompt without masks exists
            return ""
        finally:
            self._used = ()


def _answer(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return work()
    except Invalid as error:
        return {"error": str(error), "kind": "invalid"}
    except jinja2.TemplateError as error:
        return {"error": str(error), "kind": "refused"}
    except MemoryError:
        return {"error": "it takes too much memory", "kind": "failed"}
    except Exception as error:  # a template is foreign code
        return {"error": repr(error)[:1000], "kind": "failed"}


def _limit_cpu(seconds: float) -> None:
    """End the process when it computes for longer; 0 for no limit. A signal handler would have to wait for Python."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    """Serve until the input ends."""
    setup = json.loads(sys.stdin.readline())
    made: list[Renderer] = []

    def compile_template() -> dict[str, Any]:
        made.append(Renderer(setup))
        return {}

    _serve(setup["cpu_s"], compile_template)
    for line in sys.stdin:
        _serve(setup["cpu_s"], functools.partial(made[0].answer, json.loads(line)))


def _serve(cpu_s: float, work: Callable[[], dict[str, Any]]) -> None:
    _limit_cpu(cpu_s)
    answer = json.dumps(_answer(work))
    _limit_cpu(0)
    sys.stdout.write(answer + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
