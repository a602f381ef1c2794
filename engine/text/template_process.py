"""Renders one chat template in a process of its own, which `template_renderer.py` starts by this file's path.

Templates come with models, and what they get comes from whoever sends jobs: both may make them run for ever, fill the
memory, or hold Python's lock in one long call. Here that costs no other job anything. Only the standard library and
Jinja are imported, so that the process is there at once.

It reads a JSON object per line and answers with one. The first has `source`, `bos`, `eos`, `control`, `markup` and
`cpu_s`; the others `messages`, `variables`, `mark`. The answer to these is `text` and `marked` (see `marking`), or
`error` with `kind`: invalid (the request's fault), refused (by the template), failed. One with `probes` has several
such requests by their names, and gets `texts`; null for what the template can't render.
"""

from __future__ import annotations

import functools
import json
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARS = 1 << 24  # of a prompt
MAX_PROBE_CHARS = 1 << 17
THINKING = frozenset({"<think>", "</think>", "[THINK]", "[/THINK]"})  # in a message they mean what they always do
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
FROM_CALLER = "\U0010ffff"  # stands in `marked` for a character that came from the caller and could be part of markup
_COMMON = frozenset("_-./:,;'\"!?()")  # in so many words that masking them could change what a template does
# Masks are printable (what is not, Python's repr writes otherwise), rare, and letters if what they stand for are some.
_SYMBOLS, _LETTERS = range(0x1D800, 0x1DA00), range(0x30000, 0x3134B)  # SignWriting; ideographs, extension G


class Invalid(Exception):
    """The request can't be rendered, whatever the template."""


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
    """Makes the caller's characters known in a rendered prompt, through whatever the template does with them.

    Each control token has characters that tell it from words, such as `<` and `|`. In the caller's strings another
    character stands for each of these: its mask. If the prompt made of such strings is the prompt but for the masks,
    then the template treats both alike, and it shows what comes from the caller.
    """

    def __init__(self, tree: nodes.Template, source: str, control: Iterable[str], markup: Iterable[str]) -> None:
        """`control` are the texts of control tokens, `markup` those of others that belong to the template's markup."""
        control = list(control)
        self._literals = [text for text in {*control, *markup} if text.strip()]
        letters = {char for text in self._literals for char in text if not char.isspace()}
        self._telling = {char for char in letters if not char.isalnum()} - _COMMON
        self._bare = [text for text in self._literals if not self._telling & set(text)]
        self._inside = "\n".join(self._literals)
        constants = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        self._names = constants | {node.attr for node in tree.find_all(nodes.Getattr)} | ROLES
        turning = [text for text in control if text not in THINKING]
        tested = [text for text in _tested(tree) if self._telling & set(text)]
        self._tested = sorted((text for text in tested if not any(c in text for c in turning)), key=len, reverse=True)
        self._taken = set(source)
        self._letters = sorted(letters)

    def for_strings(self, strings: list[str]) -> tuple[dict[int, int], dict[int, int]]:
        """Character → its mask, for all characters of control tokens; those that tell alone. None of the masks is in
        the strings."""
        taken = self._taken.union(*(set(text) for text in strings))
        symbols, letters = (iter([code for code in codes if chr(code) not in taken]) for codes in (_SYMBOLS, _LETTERS))
        every = {ord(char): next(letters if char.isalnum() else symbols) for char in self._letters}
        return every, {code: mask for code, mask in every.items() if chr(code) in self._telling}

    def mask(self, text: str, every: dict[int, int], telling: dict[int, int], *, spare_tested: bool) -> str:
        """The text with its characters masked. What the template looks for in texts is left as it is if wanted."""
        is_name = text in self._names and text.replace("_", "").replace("-", "").isalnum()
        if is_name and not any(bare in text for bare in self._bare):
            return text
        if text and text in self._inside and not self._telling & set(text):  # part of one that the template completes
            return text.translate(every)
        tested = next((found for found in self._tested if found in text), None) if spare_tested else None
        if tested is not None:
            before, _, after = text.partition(tested)
            return tested.join(self.mask(part, every, telling, spare_tested=True) for part in (before, after))
        for bare in self._bare:
            text = text.replace(bare, bare.translate(every))
        return text.translate(telling)

    def suspect(self, prompt: str, strings: list[str]) -> str | None:
        """A control token in the prompt that the caller's strings may have a part in."""
        for literal in self._literals:
            if literal in prompt and any(self._takes_part(literal, text) for text in strings):
                return literal
        return None

    def _takes_part(self, literal: str, text: str) -> bool:
        if literal in text or (text in literal and self._telling & set(text)):
            return True
        cuts = range(1, len(literal))
        return any(
            (text.endswith(literal[:cut]) and self._telling & set(literal[:cut]))
            or (text.startswith(literal[cut:]) and self._telling & set(literal[cut:]))
            for cut in cuts
        )


def _tested(tree: nodes.Template) -> set[str]:
    """The texts that a template compares with, splits at, and so on."""
    users = tree.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test))
    return {c.value for user in users for c in user.find_all(nodes.Const) if isinstance(c.value, str) and c.value}


def _strings_of(value: Any) -> list[str]:
    """All strings in a JSON value, keys too."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for part in pair for text in _strings_of(part)]
    return [text for part in value for text in _strings_of(part)] if isinstance(value, list) else []


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The JSON value with all its strings changed."""
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
        """The prompt, and the prompt with the caller's characters marked. Raises Invalid, and what a template may."""
        if "probes" in request:
            return {"texts": {name: self._probe(probe) for name, probe in request["probes"].items()}}
        messages = request["messages"]
        text = self._render(messages, request["variables"])
        if not request["mark"]:
            return {"text": text, "marked": text}
        return {"text": text, "marked": self._marked(text, messages, request["variables"])}

    def _probe(self, probe: Mapping[str, Any]) -> str | None:
        """The prompt of a conversation by which the template is known better; None if it makes none, or a long one."""
        text = self._attempt(probe["messages"], probe["variables"], ())
        return text if 0 < len(text) <= MAX_PROBE_CHARS else None

    def _to_json(self, value: object, *arguments: Any, **options: Any) -> str:
        """As _to_json; masks stand for ASCII, and are not escaped either."""
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
        strings = _strings_of(given)
        every, telling = self._masks.for_strings(strings)
        for spare_tested in (False, True):

            def change(part: str, spare_tested: bool = spare_tested) -> str:
                return self._masks.mask(part, every, telling, spare_tested=spare_tested)

            changed = _mapped(given, change)
            if changed == given:
                return text
            masked = self._attempt(changed[0], dict(zip(variables, changed[1], strict=True)), every.values())
            if masked.translate({mask: code for code, mask in every.items()}) == text:
                return masked.translate(dict.fromkeys(every.values(), FROM_CALLER))
        suspect = self._masks.suspect(text, strings)
        if suspect is not None:
            raise Invalid(
                f"the messages contain {suspect!r}, or a part of it, and the model's chat template does with it what "
                "it does with its own control tokens; leave it out, or set control_tokens_in_text for this model"
            )
        return text

    def _attempt(self, messages: Any, variables: Any, masks: Iterable[int]) -> str:
        """The prompt of masked strings; nothing if the template takes no such strings."""
        self._used = masks
        try:
            return self._render(messages, variables)
        except Exception:  # a template is foreign code; the prompt without masks is there
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
    """The process ends when it computes for longer than that; 0 for no limit. No handler: one would wait for Python."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    """Serves until its input ends."""
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
