"""What becomes of each of OpenAI's parameters: one table per endpoint, from which the docs are made, too.

A parameter that stands in no table is one of jobs (docs/reference/parameters.md), or unknown, and then refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Fate = Literal["as it is", "renamed", "mapped", "ignored", "refused"]
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of a parameter. `to` is the job's name for it; `harmless` are values that ask for nothing."""

    fate: Fate
    note: str = ""
    to: str = ""
    harmless: tuple[Any, ...] = ()


def _as_it_is(*names: str) -> dict[str, Rule]:
    return {name: Rule("as it is") for name in names}


def _ignored(note: str, *names: str) -> dict[str, Rule]:
    return {name: Rule("ignored", note) for name in names}


def _refused(note: str, *harmless: Any) -> Rule:
    return Rule("refused", note, harmless=harmless)


_GENERATION = {
    **_as_it_is("model", "temperature", "top_p", "n", "seed", "stop", "frequency_penalty", "presence_penalty"),
    **_as_it_is("logit_bias"),
    "stream": Rule("mapped", "server-sent events; a bulk run refuses it"),
    "stream_options": Rule("mapped", "`include_usage`; its other members are ignored"),
    "service_tier": Rule(
        "mapped",
        "`flex` is bulk work (priority 9), `auto` and `default` are interactive (3), `priority` comes first (0), "
        "as far as the key allows; the answer says which it was. A bulk run ignores it",
    ),
    "response_format": Rule(
        "mapped",
        "`json_schema`, or `json_object` with or without a `schema`. With `strict: true` a keyword that can't be "
        "enforced is refused, otherwise it is ignored and listed in `warnings`",
        "json_schema",
    ),
    "prediction": Rule("as it is", "a hint: right parts come faster, and no text changes"),
    **_ignored("the tenant of the key is who asks", "user", "safety_identifier"),
    **_ignored("nothing is stored beyond the life of a result", "metadata", "store"),
    **_ignored(
        "prefixes are shared without being told", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"
    ),
}
PARAMETERS: Mapping[str, Mapping[str, Rule]] = {
    CHAT: {
        **_GENERATION,
        "messages": Rule(
            "mapped", "role `developer` is `system`; `reasoning_content` is `reasoning`; parts must be text", "messages"
        ),
        "max_tokens": Rule("as it is", "default: what the context has room for"),
        "max_completion_tokens": Rule("renamed", to="max_tokens"),
        **_as_it_is("tools"),
        "tool_choice": Rule(
            "mapped", "`auto`, `none`, `required`, a function, whose call is then forced, or `allowed_tools`"
        ),
        "parallel_tool_calls": Rule("as it is", "not said: as many as the model makes, one where a call is forced"),
        "logprobs": Rule("mapped", "a switch"),
        "top_logprobs": Rule("mapped", "how many; needs `logprobs`", "logprobs"),
        "reasoning_effort": Rule("mapped", "`none` turns thinking off; all go to the chat template", "template_args"),
        "verbosity": Rule("ignored", "say in the system message how long answers shall be"),
        "functions": _refused("it is deprecated: use `tools`", []),
        "function_call": _refused("it is deprecated: use `tool_choice`"),
        "modalities": _refused("text is all that comes", ["text"]),
        "audio": _refused("text is all that comes"),
        "moderation": _refused("there is no moderation"),
        "web_search_options": _refused("there is no web search; give the model a tool"),
    },
    COMPLETIONS: {
        **_GENERATION,
        "prompt": Rule("as it is", "a text, token ids, or a list of either: a job for each"),
        "max_tokens": Rule("as it is", "default: 16, as OpenAI's"),
        "logprobs": Rule("as it is"),
        "best_of": _refused("all completions are given: use `n`", 1),
        "echo": _refused("the prompt is not repeated", False),
        "suffix": _refused("text is only generated after a prompt", ""),
    },
    EMBEDDINGS: {
        "model": Rule("as it is"),
        "input": Rule("renamed", "a text, token ids, or a list of either", "texts"),
        "encoding_format": Rule("mapped", "`float` or `base64`", "encoding"),
        "dimensions": Rule("as it is"),
        **_ignored("the tenant of the key is who asks", "user"),
    },
}
CONTENT = {CHAT: "messages", COMPLETIONS: "prompt", EMBEDDINGS: "input"}
