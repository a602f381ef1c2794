"""Define how each of OpenAI's parameters is handled.

There is one table per endpoint, and the documentation is generated from these tables. A parameter that is not in a
table must be a job parameter (docs/reference/parameters.md). All other parameters are rejected.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Handling = Literal["unchanged", "renamed", "mapped", "ignored", "rejected"]
# The start of an error message of a job, if it names a parameter.
_NAMED = re.compile(r"^(unknown parameter ')?([a-z_]+)(?= is | and | at #| can't |\.|\[|')")
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


@dataclass(frozen=True, slots=True)
class ParameterRule:
    """Defines how a parameter is handled.

    `to` is the parameter's name in jobs. A parameter that is normally rejected is accepted if its value is in
    `harmless`.
    """

    handling: Handling
    note: str = ""
    to: str = ""
    harmless: tuple[Any, ...] = ()

    def rejects(self, value: Any) -> bool:
        """Return whether a request with this value is rejected."""
        is_harmless = any(value == harmless and type(value) is type(harmless) for harmless in self.harmless)
        return self.handling == "rejected" and not is_harmless


def callers_names(rules: Mapping[str, ParameterRule], body: Mapping[str, Any]) -> dict[str, str]:
    """Return a mapping from job parameters to the caller's names for them, which error messages need.

    A parameter that the body specifies under its job name is not renamed.
    """
    names = {
        rule.to: name
        for name, rule in rules.items()
        if rule.to and rule.handling in ("renamed", "mapped") and rule.to not in body and not _is_taken(rules, rule.to)
    }
    return names | names_of_other_servers(rules, body)


def names_of_other_servers(rules: Mapping[str, ParameterRule], body: Mapping[str, Any]) -> dict[str, str]:
    """Return a mapping from job parameters to the vLLM and llama-server names in the body."""
    given = [name for name in body if name in OTHER_SERVERS and name not in rules]
    return {rule.to: name for name in given if (rule := OTHER_SERVERS[name]).to and rule.to not in body}


def _is_taken(rules: Mapping[str, ParameterRule], name: str) -> bool:
    """Return whether the endpoint has its own parameter with this name."""
    return name in rules and rules[name].handling != "rejected"


def with_callers_names(message: str, names: Mapping[str, str]) -> tuple[str, str | None]:
    """Replace a parameter's name in an error message with the caller's name.

    Return the changed message, and the name that the caller used for the parameter. The name is None if the message
    does not mention a parameter. The name is found by a regular expression because worker errors reach the gateway as
    text.
    """
    found = _NAMED.match(message)
    if found is None:
        return message, None
    name = found[2] if found[1] else names.get(found[2], found[2])
    return message.replace(found[2], name, 1), name


def _unchanged(*names: str) -> dict[str, ParameterRule]:
    return {name: ParameterRule("unchanged") for name in names}


def _ignored(note: str, *names: str) -> dict[str, ParameterRule]:
    return {name: ParameterRule("ignored", note) for name in names}


def _rejected(note: str, *harmless: Any) -> ParameterRule:
    return ParameterRule("rejected", note, harmless=harmless)


_GENERATION = {
    **_unchanged("model", "temperature", "top_p", "n", "seed", "stop", "frequency_penalty", "presence_penalty"),
    **_unchanged("logit_bias"),
    "stream": ParameterRule("mapped", "server-sent events; bulk runs reject it"),
    "stream_options": ParameterRule("mapped", "`include_usage`; other members are ignored"),
    "service_tier": ParameterRule(
        "mapped",
        "`flex` runs as bulk work (priority 9), `auto` and `default` run as interactive work (3), and `priority` runs "
        "first (0), within the limit of the API key. The response reports the tier that was used. Bulk runs ignore "
        "this parameter",
    ),
    "response_format": ParameterRule(
        "mapped",
        "`json_schema`, or `json_object` with or without a `schema`. With `strict: true` a keyword that can't be "
        "enforced is rejected. Otherwise it is ignored and listed in `warnings`",
        "json_schema",
    ),
    "prediction": ParameterRule(
        "unchanged", "a hint that speeds up the generation of matching parts and doesn't change the text"
    ),
    **_ignored("users are identified by tenant unless `gateway_user_shares` is set", "user", "safety_identifier"),
    **_ignored("no data is stored longer than the result", "metadata", "store"),
    **_ignored("prefixes are always shared", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
}
PARAMETERS: Mapping[str, Mapping[str, ParameterRule]] = {
    CHAT: {
        **_GENERATION,
        "messages": ParameterRule(
            "mapped",
            "role `developer` becomes `system`, and `reasoning_content` becomes `reasoning`; all content parts must be "
            "text; members that clients add to replies, such as `parsed` and `annotations`, are ignored",
            "messages",
        ),
        "max_tokens": ParameterRule("unchanged", "default: the rest of the context"),
        "max_completion_tokens": ParameterRule("renamed", to="max_tokens"),
        "tools": ParameterRule("mapped", "`cache_control` is ignored, because prefixes are always cached", "tools"),
        "tool_choice": ParameterRule(
            "mapped", "`auto`, `none`, `required`, `allowed_tools`, or a function that the model must call"
        ),
        "parallel_tool_calls": ParameterRule(
            "unchanged", "default: as many calls as the model makes, or one if a call is forced"
        ),
        "logprobs": ParameterRule("mapped", "enables log probabilities"),
        "top_logprobs": ParameterRule(
            "mapped", "number of alternatives per token, up to 20; requires `logprobs`", "logprobs"
        ),
        "reasoning_effort": ParameterRule(
            "mapped",
            "`none` disables thinking, `minimal` leaves the decision to the chat template, and other values enable "
            "thinking; the template also receives the value, and a template without this variable ignores it",
            "template_args",
        ),
        "verbosity": ParameterRule("ignored", "describe the length of answers in the system message instead"),
        "functions": _rejected("it is deprecated; use `tools`", []),
        "function_call": _rejected("it is deprecated; use `tool_choice`"),
        "modalities": _rejected("answers contain only text", ["text"]),
        "audio": _rejected("answers contain only text"),
        "moderation": _rejected("moderation is not available"),
        "web_search_options": _rejected("web search is not available; define a tool for it"),
    },
    COMPLETIONS: {
        **_GENERATION,
        "prompt": ParameterRule("unchanged", "a text, token ids, or a list of either, with one job per entry"),
        "max_tokens": ParameterRule("unchanged", "default: 16, as in OpenAI's API"),
        "logprobs": ParameterRule("unchanged"),
        "best_of": _rejected("all completions are returned; use `n`", 1),
        "echo": _rejected("answers do not repeat the prompt", False),
        "suffix": ParameterRule("unchanged", "only for models with tokens to fill in the middle of a text"),
    },
    EMBEDDINGS: {
        "model": ParameterRule("unchanged"),
        "input": ParameterRule("renamed", "a text, token ids, or a list of either", "texts"),
        "encoding_format": ParameterRule("mapped", "`float` or `base64`", "encoding"),
        "dimensions": ParameterRule("unchanged"),
        **_ignored("users are identified by tenant unless `gateway_user_shares` is set", "user"),
    },
}

_SERVERS_OWN = "it affects only llama-server's slots and reports"
OTHER_SERVERS: Mapping[str, ParameterRule] = {
    "repetition_penalty": ParameterRule("renamed", "applies to the last `repeat_last_n` tokens", "repeat_penalty"),
    "n_predict": ParameterRule("renamed", to="max_tokens"),
    "n_cmpl": ParameterRule("renamed", to="n"),
    "typ_p": ParameterRule("renamed", to="typical_p"),
    "thinking_token_budget": ParameterRule("renamed", to="thinking_budget"),
    "chat_template_kwargs": ParameterRule(
        "mapped", "`enable_thinking` sets the parameter with this name", "template_args"
    ),
    "reasoning_effort": ParameterRule("mapped", "as in chat completions", "template_args"),
    "structured_outputs": ParameterRule(
        "mapped",
        "one of `json`, `regex`, `choice`, `grammar` (GBNF or Lark) and `json_object` sets the parameter for the same "
        "constraint",
        "json_schema",
    ),
    "guided_json": ParameterRule("mapped", to="json_schema"),
    "guided_regex": ParameterRule("mapped", to="regex"),
    "guided_choice": ParameterRule("mapped", "a regular expression that matches the texts", "regex"),
    "guided_grammar": ParameterRule("mapped", "GBNF or Lark", "grammar"),
    **_ignored("llguidance enforces all constraints", "guided_decoding_backend"),
    **_ignored(_SERVERS_OWN, "timings_per_token", "return_progress", "id_slot", "n_keep", "n_discard", "n_cache_reuse"),
    **_ignored("the header `x-request-id` identifies the request", "request_id", "session_id"),
    "reasoning_format": _rejected("reasoning is always separate from the text", "auto", "deepseek"),
    "include_reasoning": _rejected("answers always include the reasoning; use `enable_thinking`", True),
    "parse_tool_calls": _rejected("tool calls are always separate from the text", True),
    "skip_special_tokens": _rejected("control tokens have no text; use `return_tokens` for their ids", True),
    "spaces_between_special_tokens": _rejected("control tokens have no text", True),
    "use_beam_search": _rejected("beam search is not available", False),
    "length_penalty": _rejected("beam search is not available", 1),
    "early_stopping": _rejected("beam search is not available", False),
    "detokenize": _rejected("answers always contain text", True),
    "n_probs": _rejected("use `logprobs`", 0),
    "post_sampling_probs": _rejected("log probabilities come from the distribution before sampling", False),
    "min_keep": _rejected("filters always keep at least one token", 0, 1),
    "bad_words": _rejected("use `logit_bias` with token ids", []),
    "lora": _rejected("use `adapters`", []),
    "return_tokens_as_token_ids": _rejected("use `return_tokens`", False),
    "return_token_ids": _rejected("use `return_tokens`", False),
}
CONTENT = {CHAT: "messages", COMPLETIONS: "prompt", EMBEDDINGS: "input"}
