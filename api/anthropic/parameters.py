"""Define how each of Anthropic's parameters is handled. The documentation is generated from this table.

A parameter that is not in the table must be a parameter of jobs (docs/reference/parameters.md). Otherwise it is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from cellama.api.openai.parameters import ParameterRule

MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"

PARAMETERS: Mapping[str, ParameterRule] = {
    "model": ParameterRule("unchanged"),
    "max_tokens": ParameterRule("unchanged", "required"),
    "messages": ParameterRule(
        "mapped",
        "blocks `text`, `tool_use`, `tool_result` and `thinking`; text blocks are joined with empty lines",
        "messages",
    ),
    "system": ParameterRule(
        "mapped", "a string or blocks; a first line `x-anthropic-billing-header: …` is removed", "messages"
    ),
    "stop_sequences": ParameterRule("renamed", to="stop"),
    "temperature": ParameterRule("unchanged"),
    "top_p": ParameterRule("unchanged"),
    "top_k": ParameterRule("unchanged"),
    "stream": ParameterRule("mapped", "server-sent events"),
    "tools": ParameterRule("mapped", "type `custom`; tools that Anthropic runs or defines are refused", "tools"),
    "tool_choice": ParameterRule("mapped", "`auto`, `any`, `tool`, `none`; `disable_parallel_tool_use`", "tool_choice"),
    "thinking": ParameterRule(
        "mapped",
        "`enabled` with `budget_tokens`, `adaptive`, `disabled` (default). `display: omitted` leaves reasoning and "
        "its signature empty",
        "enable_thinking",
    ),
    "output_config": ParameterRule(
        "mapped",
        "the chat template receives `effort`. `format` has a schema: keywords that can't be enforced are ignored and "
        "listed in `warnings`, because Anthropic's clients move such keywords into descriptions before they send a "
        "schema. `strict_schema: true` refuses them",
        "json_schema",
    ),
    "output_format": ParameterRule("refused", "it was renamed; use `output_config.format`"),
    "service_tier": ParameterRule(
        "mapped",
        "`auto` is the tier of the key, `standard_only` at most `default`. OpenAI's `flex`, `default` and `priority` "
        "work as well. The usage reports `batch`, `standard` or `priority`",
    ),
    "cache_control": ParameterRule("ignored", "prefixes are always shared, including blocks and tools"),
    "metadata": ParameterRule("ignored", "the tenant of the API key identifies the user"),
    "user_profile_id": ParameterRule("ignored", "the tenant of the API key identifies the user"),
    "workspace_id": ParameterRule("ignored", "the tenant of the API key identifies the user"),
    "inference_geo": ParameterRule("refused", "workers run where you start them", "", ("global",)),
    "speed": ParameterRule("refused", "there is only one speed", "", ("standard",)),
    "diagnostics": ParameterRule("refused", "not available; see `cellama status`"),
    "thread": ParameterRule(
        "refused", "the gateway stores no conversations; send all messages, as the client's tool runner does then"
    ),
    "container": ParameterRule("refused", "the gateway runs nothing for the model; give it tools"),
    "mcp_servers": ParameterRule("refused", "the gateway runs nothing for the model; give it tools", "", ([],)),
    "context_management": ParameterRule(
        "refused",
        "conversations are used as they are sent; shorten them yourself. Keeping all reasoning is accepted, because "
        "it is the default",
        harmless=({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    ),
    "n": ParameterRule("refused", "an answer has one message", "", (1,)),
    "logprobs": ParameterRule("refused", "the answer has no field for them; use /v1/chat/completions"),
    "return_tokens": ParameterRule("refused", "the answer has no field for them; use /tokenize", "", (False,)),
}
COUNTED = (  # the parameters that counting tokens accepts
    *("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "output_format"),
    *("cache_control", "speed", "user_profile_id", "workspace_id", "mcp_servers", "context_management"),
)
