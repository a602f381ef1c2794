"""How each of OpenAI's parameters is handled: one table per endpoint, from which the documentation is generated.

A parameter that is in no table is one of jobs (docs/reference/parameters.md), or unknown, and then refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Fate = Literal["as it is", "renamed", "mapped", "ignored", "refused"]
# How the message of a job's error begins that names a parameter.
_NAMED = re.compile(r"^(unknown parameter ')?([a-z_]+)(?= is | and | at #| can't |\.|\[|')")
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


@dataclass(frozen=True, slots=True)
class ParameterRule:
    """How a parameter is handled. `to` is the job's name for it; `harmless` values of a refused one are accepted."""

    fate: Fate
    note: str = ""
    to: str = ""
    harmless: tuple[Any, ...] = ()

    def refuses(self, value: Any) -> bool:
        """Return whether a request with this value is refused."""
        is_harmless = any(value == harmless and type(value) is type(harmless) for harmless in self.harmless)
        return self.fate == "refused" and not is_harmless


def callers_names(rules: Mapping[str, ParameterRule], body: Mapping[str, Any]) -> dict[str, str]:
    """Return the caller's names of a job's parameters, by which errors of the job name them.

    A parameter that the body gives by the job's own name keeps it.
    """
    return {
        rule.to: name
        for name, rule in rules.items()
        if rule.to and rule.fate in ("renamed", "mapped") and rule.to not in body and not _is_taken(rules, rule.to)
    }


def _is_taken(rules: Mapping[str, ParameterRule], name: str) -> bool:
    """Return whether the endpoint has a parameter of its own with this name."""
    return name in rules and rules[name].fate != "refused"


def in_callers_words(message: str, names: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the message of a job's error with the caller's name of the parameter, and that name if there is one.

    Errors of workers reach the gateway as text, so the name is found in the message.
    """
    found = _NAMED.match(message)
    if found is None:
        return message, None
    name = found[2] if found[1] else names.get(found[2], found[2])
    return message.replace(found[2], name, 1), name


def _as_it_is(*names: str) -> dict[str, ParameterRule]:
    return {name: ParameterRule("as it is") for name in names}


def _ignored(note: str, *names: str) -> dict[str, ParameterRule]:
    return {name: ParameterRule("ignored", note) for name in names}


def _refused(note: str, *harmless: Any) -> ParameterRule:
    return ParameterRule("refused", note, harmless=harmless)


_GENERATION = {
    **_as_it_is("model", "temperature", "top_p", "n", "seed", "stop", "frequency_penalty", "presence_penalty"),
    **_as_it_is("logit_bias"),
    "stream": ParameterRule("mapped", "server-sent events; bulk runs refuse it"),
    "stream_options": ParameterRule("mapped", "`include_usage`; its other members are ignored"),
    "service_tier": ParameterRule(
        "mapped",
        "`flex` is bulk work (priority 9), `auto` and `default` are interactive (3), `priority` comes first (0), "
        "as far as the key allows. The answer reports the tier that was used. Bulk runs ignore it",
    ),
    "response_format": ParameterRule(
        "mapped",
        "`json_schema`, or `json_object` with or without a `schema`. With `strict: true` a keyword that can't be "
        "enforced is refused. Otherwise it is ignored and listed in `warnings`",
        "json_schema",
    ),
    "prediction": ParameterRule("as it is", "a hint: correct parts are generated faster, and no text changes"),
    **_ignored("the tenant of the API key identifies the user", "user", "safety_identifier"),
    **_ignored("nothing is stored longer than a result", "metadata", "store"),
    **_ignored("prefixes are always shared", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
}
PARAMETERS: Mapping[str, Mapping[str, ParameterRule]] = {
    CHAT: {
        **_GENERATION,
        "messages": ParameterRule(
            "mapped", "role `developer` is `system`; `reasoning_content` is `reasoning`; parts must be text", "messages"
        ),
        "max_tokens": ParameterRule("as it is", "default: the rest of the context"),
        "max_completion_tokens": ParameterRule("renamed", to="max_tokens"),
        **_as_it_is("tools"),
        "tool_choice": ParameterRule(
            "mapped", "`auto`, `none`, `required`, a function, whose call is then forced, or `allowed_tools`"
        ),
        "parallel_tool_calls": ParameterRule(
            "as it is", "default: as many calls as the model makes, or one if a call is forced"
        ),
        "logprobs": ParameterRule("mapped", "turns them on"),
        "top_logprobs": ParameterRule("mapped", "their number; needs `logprobs`", "logprobs"),
        "reasoning_effort": ParameterRule(
            "mapped", "`none` disables thinking; the chat template receives all values", "template_args"
        ),
        "verbosity": ParameterRule("ignored", "describe the length of answers in the system message"),
        "functions": _refused("it is deprecated; use `tools`", []),
        "function_call": _refused("it is deprecated; use `tool_choice`"),
        "modalities": _refused("answers are text only", ["text"]),
        "audio": _refused("answers are text only"),
        "moderation": _refused("moderation is not available"),
        "web_search_options": _refused("web search is not available; give the model a tool"),
    },
    COMPLETIONS: {
        **_GENERATION,
        "prompt": ParameterRule("as it is", "a text, token ids, or a list of either, with a job for each"),
        "max_tokens": ParameterRule("as it is", "default: 16, as OpenAI's"),
        "logprobs": ParameterRule("as it is"),
        "best_of": _refused("all completions are returned; use `n`", 1),
        "echo": _refused("answers do not repeat the prompt", False),
        "suffix": _refused("text is generated only after a prompt", ""),
    },
    EMBEDDINGS: {
        "model": ParameterRule("as it is"),
        "input": ParameterRule("renamed", "a text, token ids, or a list of either", "texts"),
        "encoding_format": ParameterRule("mapped", "`float` or `base64`", "encoding"),
        "dimensions": ParameterRule("as it is"),
        **_ignored("the tenant of the API key identifies the user", "user"),
    },
}
CONTENT = {CHAT: "messages", COMPLETIONS: "prompt", EMBEDDINGS: "input"}
