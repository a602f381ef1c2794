"""Seeded random payloads for `fuzz`, which are valid, valid with extreme values, almost valid, or arbitrary JSON."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from random import Random
from typing import Any

from cellama.tasks.app import app
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.kinds.chat import TASK_CHAT
from cellama.tasks.contract.kinds.chunk import LINE_JOBS, TASK_CHUNK
from cellama.tasks.contract.kinds.embed import TASK_EMBED
from cellama.tasks.contract.kinds.generate import TASK_GENERATE
from cellama.tasks.contract.kinds.rerank import TASK_RERANK
from cellama.tasks.contract.kinds.tokens import TASK_APPLY_CHAT_TEMPLATE, TASK_DETOKENIZE, TASK_TOKENIZE
from cellama.tasks.contract.names import SUBMITTED_AT_HEADER
from cellama.tasks.contract.payloads import parse_job
from cellama.tasks.jobs import JobTask

from .hostile import HUGE_INT, MODEL, SURROGATE, FuzzPayload

TASKS = (
    *(TASK_GENERATE,) * 4,
    *(TASK_CHAT,) * 3,
    *(TASK_EMBED, TASK_RERANK, TASK_TOKENIZE, TASK_DETOKENIZE, TASK_APPLY_CHAT_TEMPLATE, TASK_CHUNK),
)
MOST_TOKENS = 24  # payloads may be hostile, but not just large, because each must end within the limit
TIMEOUT_S = 10.0

INTS = [0, 1, -1, 2, 3, 7, 64, 100, 127, 128, 255, 256, 1000, 2047, 2048, 65_536]
INTS += [2**31 - 1, 2**31, -(2**31), 2**32 - 2, 2**63 - 1, 2**63, HUGE_INT, -HUGE_INT]
FLOATS = [0.0, -0.0, 0.1, 0.5, 1.0, 1.5, -1.0, 1e-308, 5e-324, 1e-9, 1e9, 1e38, 1e39, 1e308, -1e308]
FLOATS += [math.nan, math.inf, -math.inf]
TEXTS = [
    "",
    " ",
    "a",
    "fox",
    "0",
    "true",
    "null",
    "\0",
    SURROGATE,
    "\udc00\ud800",
    "é",
    "e\u0301",
    "\u202e",
    "🦊",
    "\n",
]
TEXTS += ["<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>\n{", "{", '{"a": 1}', "[]", "root"]
TEXTS += [
    "Once upon a time",
    "a b " * 300,
    "x" * 3000,
    "tiny",
    ":default",
    "../..",
    "%s%n",
    "😀" * 200,
    "\x1f",
    "{{ 7*7 }}",
]
WORDS = "Once upon a time there was a little fox named Mia who lived in a green forest with her friend Tom".split()


def payload(seed: int, number: int) -> FuzzPayload:
    """Return payload number `number`, which depends only on this number and the seed."""
    random = Random(f"{seed} {number}")
    task = random.choice(TASKS)
    make = random.choice((_right, _right, _at_the_edge, _at_the_edge, _nearly_right, _nearly_right, _anything))
    args, kwargs = make(random, task)
    headers = {SUBMITTED_AT_HEADER: _value(random)} if random.random() < 0.02 else {}
    return FuzzPayload(f"{number} {make.__name__.lstrip('_')}", task, args, kwargs, headers)


def _right(random: Random, task: str) -> tuple[list[Any], dict[str, Any]]:
    """Return a realistic call."""
    if task == TASK_CHUNK:
        return [MODEL, [_line(random, _right) for _ in range(random.randint(1, 6))]], {}
    args, kwargs = [MODEL, *_content(random, task)], {}
    for name in random.sample(sorted(_MAKERS), random.randint(0, 4)):
        if name in _fields(task):
            kwargs[name] = _MAKERS[name](random)
    return args, _tamed(random, task, kwargs)


def _at_the_edge(random: Random, task: str) -> tuple[list[Any], dict[str, Any]]:
    """Return a call that passes the checks with some extreme parameters."""
    args, kwargs = _right(random, task)
    edges = _edges(task)
    for name in random.sample(sorted(edges), min(len(edges), random.randint(1, 5))):
        kwargs[name] = random.choice(edges[name])
    return args, _tamed(random, task, kwargs)


def _nearly_right(random: Random, task: str) -> tuple[list[Any], dict[str, Any]]:
    """Return a call with one to three mistakes."""
    args, kwargs = _right(random, task)
    call = {"args": args, "kwargs": json.loads(json.dumps(kwargs))}
    for _ in range(random.randint(1, 3)):
        name = random.choice([*_fields(task), random.choice(TEXTS)])
        kind = random.random()
        if kind < 0.5:
            call["kwargs"][name] = _value(random)
        else:
            _spoil(random, call["kwargs"] if kind < 0.7 and call["kwargs"] else call["args"])
    return list(call["args"]), _tamed(random, task, dict(call["kwargs"]))


def _anything(random: Random, task: str) -> tuple[list[Any], dict[str, Any]]:
    args = [_value(random) for _ in range(random.randint(0, 4))]
    if random.random() < 0.7:
        args[:1] = [MODEL]
    names = [random.choice([*_fields(task), *TEXTS]) for _ in range(random.randint(0, 5))]
    return args, _tamed(random, task, {name: _value(random) for name in names})


def _line(random: Random, make: Callable[..., Any]) -> dict[str, Any]:
    kind = random.choice(sorted(LINE_JOBS))
    args, kwargs = make(random, f"cellama.{kind}")
    names = [name for name in _task(f"cellama.{kind}").kind.positional if name != "model"]
    params = {**kwargs, **dict(zip(names, args[1:], strict=False))}
    return {"kind": kind, "params": {k: v for k, v in params.items() if k != "priority"}}


def _tamed(random: Random, task: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Limit the job's time and number of tokens, unless the payload sets its own limits."""
    if task not in (TASK_GENERATE, TASK_CHAT):
        return kwargs
    kwargs.setdefault("timeout", TIMEOUT_S)
    kwargs.setdefault("max_tokens", random.randint(1, MOST_TOKENS))
    many = kwargs.get("n", 1)
    if isinstance(many, int) and many > 4 and isinstance(kwargs["max_tokens"], int):
        kwargs["max_tokens"] = min(kwargs["max_tokens"], 4)
    return kwargs


def _spoil(random: Random, container: Any) -> None:
    """Replace, remove or add a value anywhere in the payload."""
    keys = list(container) if isinstance(container, dict) else list(range(len(container)))
    if not keys:
        return
    key = random.choice(keys)
    inner = container[key]
    if isinstance(inner, dict | list) and inner and random.random() < 0.6:
        _spoil(random, inner)
    elif random.random() < 0.2:
        del container[key]
    elif isinstance(container, dict) and random.random() < 0.3:
        container[random.choice(TEXTS)] = _value(random)
    else:
        container[key] = _value(random)


def _value(random: Random, depth: int = 0) -> Any:
    """Return a random JSON value. Values that often cause problems are more likely than others."""
    kind = random.random()
    if depth > 3 or kind < 0.6:
        return random.choice((None, True, False, random.choice(INTS), random.choice(FLOATS), random.choice(TEXTS)))
    if kind < 0.62:
        value: Any = random.choice(TEXTS)
        for _ in range(random.choice((20, 200, 900))):
            value = [value] if random.random() < 0.5 else {"a": value}
        return value
    if kind < 0.8:
        return [_value(random, depth + 1) for _ in range(random.choice((0, 1, 2, 3, 30)))]
    if kind < 0.9:
        return {random.choice(TEXTS): _value(random, depth + 1) for _ in range(random.randint(0, 4))}
    return random.choice((_grammar, _schema, _messages, _tools))(random)


def _task(name: str) -> JobTask:
    task: JobTask = app.tasks[name]
    return task


@functools.cache
def _fields(task: str) -> tuple[str, ...]:
    return tuple(sorted(_task(task).kind.payload.model_fields))


@functools.cache
def _edges(task: str) -> dict[str, list[Any]]:
    """Return, for each parameter, the extreme values that pass the checks in an otherwise normal call."""
    kind, base = _task(task).kind.payload, _BASES[task]
    texts = [text for text in TEXTS if text]
    values: tuple[Any, ...] = (*INTS, *FLOATS, *TEXTS, True, False, texts[1:9], {"5": 1e308, "1023": -1e308})
    found: dict[str, list[Any]] = {}
    for name in sorted(kind.model_fields.keys() - base.keys() - {"model", "timeout"}):
        for value in values:
            try:
                parse_job(kind, (), (), {**base, name: value})
            except InvalidJob:
                continue
            found.setdefault(name, []).append(value)
    return found


def _content(random: Random, task: str) -> list[Any]:
    """Return the arguments that follow the model in a valid call."""
    if task in (TASK_CHAT, TASK_APPLY_CHAT_TEMPLATE):
        return [_messages(random)]
    if task == TASK_EMBED:
        return [[_text(random) for _ in range(random.randint(1, 8))]]
    if task == TASK_RERANK:
        return [_text(random), [_text(random) for _ in range(random.randint(1, 8))]]
    if task == TASK_DETOKENIZE or (task == TASK_GENERATE and random.random() < 0.3):
        return [[random.randrange(1024) for _ in range(random.randint(1, 40))]]
    return [_text(random)]


def _text(random: Random) -> str:
    return " ".join(random.choices(WORDS, k=random.randint(1, 20))) + random.choice(("", "", " 🦊", "<|im_end|>", "\n"))


def _messages(random: Random) -> list[Any]:
    messages: list[Any] = [{"role": "user", "content": _text(random)}]
    if random.random() < 0.3:
        messages.insert(0, {"role": "system", "content": _text(random)})
    if random.random() < 0.4:
        call = {"type": "function", "function": {"name": "f", "arguments": random.choice(('{"a": 1}', "{", "[]"))}}
        messages += [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": _text(random)}]
    return messages


def _tools(random: Random) -> list[Any]:
    properties = {name: _schema(random) for name in random.sample(("a", "b", "c d", "é", '"'), random.randint(0, 3))}
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:2]}
    names = random.sample(("f", "get.weather", "a-b", "x" * 64), random.randint(1, 2))
    return [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in names]


def _schema(random: Random, depth: int = 0) -> Any:
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    kind = random.choice([*kinds, "array", "object", "anyOf", "ref"] if depth < 3 else kinds)
    few = random.choice((0, 1, 2, 5))
    if kind == "array":
        return {
            "type": kind,
            "items": _schema(random, depth + 1),
            "minItems": few,
            "maxItems": random.choice((1, 5, 50)),
        }
    if kind == "object":
        names = random.sample(("a", "b", "c d", "é\n", '"\\', SURROGATE), few % 4)
        return {"type": kind, "properties": {name: _schema(random, depth + 1) for name in names}, "required": names[:1]}
    if kind == "anyOf":
        return {"anyOf": [_schema(random, depth + 1) for _ in range(few + 1)]}
    if kind == "ref":
        return {"$defs": {"a": _schema(random, depth + 1)}, "$ref": random.choice(("#/$defs/a", "#/$defs/b", "#"))}
    special = {"enum": [_value(random, 3) for _ in range(few + 1)], "const": _value(random, 3)}
    patterns = ("^a+$", "^a|b$", "^.$", r"^\d{2,4}$", "^(a(b)?)*$", "^[^a-z]$", "^", r"^\w+@\w$", "^a{1000}$")
    special["pattern"] = random.choice(patterns)
    return {kind: special[kind]} if kind in special else {"type": kind}


def _grammar(random: Random) -> str:
    """Return rules with random references to other rules and to themselves."""
    names = ("root", "a", "b", "c")
    return "\n".join(f"{name} ::= {_alternatives(random, names, 0)}" for name in names[: random.randint(1, 4)])


def _alternatives(random: Random, names: tuple[str, ...], depth: int) -> str:
    return " | ".join(
        " ".join(_element(random, names, depth) for _ in range(random.randint(1, 3)))
        for _ in range(random.randint(1, 3))
    )


def _element(random: Random, names: tuple[str, ...], depth: int) -> str:
    parts = ['"a"', '"fox "', "[a-z ]", "[^\\n]", '"\\n"', ".", '""', *names]
    if depth < 3:
        parts += [f"({_alternatives(random, names, depth + 1)})"] * 3
    return random.choice(parts) + random.choice(("", "", "", "?", "*", "+", "{2}", "{1,9}", "{0,2000}"))


_MAKERS: dict[str, Callable[[Random], Any]] = {
    "priority": lambda random: random.randrange(10),
    "temperature": lambda random: random.choice((0, 0.5, 1.0, 2.0)),
    "top_k": lambda random: random.choice((0, 1, 40)),
    "seed": lambda random: random.randrange(2**32 - 2),
    "repeat_penalty": lambda random: random.choice((1.1, 1.5)),
    "dry_multiplier": lambda random: random.choice((0.8, 1.0)),
    "mirostat": lambda random: random.randrange(3),
    "logit_bias": lambda random: {str(random.randrange(1024)): random.uniform(-9, 9)},
    "grammar": _grammar,
    "json_schema": _schema,
    "logprobs": lambda random: random.choice((0, 1, 5)),
    "n": lambda random: random.choice((1, 2, 3)),
    "stop": lambda random: random.choice(("fox", ["a", "b"], [])),
    "cache_prompt": lambda random: random.random() < 0.5,
    "cache_scope": lambda random: random.choice(("", "a", "b")),
    "ignore_eos": lambda random: random.random() < 0.5,
    "stream": lambda random: random.random() < 0.5,
    "tools": _tools,
    "tool_choice": lambda random: random.choice(("auto", "none", "required", "f")),
    "enable_thinking": lambda random: random.random() < 0.5,
    "thinking_budget": lambda random: random.choice((0, 1, 8)),
    "normalize": lambda random: random.random() < 0.5,
    "dimensions": lambda random: random.choice((1, 64, 192)),
    "truncate": lambda random: random.random() < 0.5,
    "encoding": lambda random: random.choice(("list", "base64")),
    "top_n": lambda random: random.choice((1, 3)),
    "add_special": lambda random: random.random() < 0.5,
    "parse_special": lambda random: random.random() < 0.5,
}
_BASES: dict[str, dict[str, Any]] = {
    TASK_GENERATE: {"model": MODEL, "prompt": "Hi"},
    TASK_CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]},
    TASK_EMBED: {"model": MODEL, "texts": ["fox"]},
    TASK_RERANK: {"model": MODEL, "query": "fox", "documents": ["fox"]},
    TASK_TOKENIZE: {"model": MODEL, "text": "fox"},
    TASK_DETOKENIZE: {"model": MODEL, "tokens": [5]},
    TASK_APPLY_CHAT_TEMPLATE: {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]},
    TASK_CHUNK: {"model": MODEL, "lines": [{"kind": "generate", "params": {"prompt": "Hi", "max_tokens": 2}}]},
}
