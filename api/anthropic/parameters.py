"""Define how each of Anthropic's parameters is handled. The documentation is generated from this table.

A parameter that is not in the table must be a job parameter (docs/reference/parameters.md). All other parameters are
rejected.
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
    "tools": ParameterRule("mapped", "type `custom`; tools that Anthropic runs or defines are rejected", "tools"),
    "tool_choice": ParameterRule("mapped", "`auto`, `any`, `tool`, `none`; `disable_parallel_tool_use`", "tool_choice"),
    "thinking": ParameterRule(
        "mapped",
        "`enabled` with `budget_tokens`, `adaptive`, `disabled` (default). `display: omitted` and `updates` leave "
        "reasoning and its signature empty",
        "enable_thinking",
    ),
    "output_config": ParameterRule(
        "mapped",
        "the chat template receives `effort`. `format` contains the schema. Keywords that can't be enforced are "
        "ignored and listed in `warnings`, because Anthropic's clients move such keywords into descriptions before "
        "they send a schema. With `strict_schema: true`, they are rejected",
        "json_schema",
    ),
    "output_format": ParameterRule("rejected", "it was renamed; use `output_config.format`"),
    "service_tier": ParameterRule(
        "mapped",
        "`auto` selects the key's tier, and `standard_only` selects `default` or lower. OpenAI's `flex`, `default` "
        "and `priority` also work. The usage reports `batch`, `standard` or `priority`",
    ),
    "cache_control": ParameterRule("ignored", "all prefixes are cached automatically, including blocks and tools"),
    "metadata": ParameterRule("ignored", "users are identified by tenant unless `gateway_user_shares` is set"),
    "user_profile_id": ParameterRule("ignored", "users are identified by the API key's tenant"),
    "workspace_id": ParameterRule("ignored", "users are identified by the API key's tenant"),
    "inference_geo": ParameterRule("rejected", "requests run on your own workers", "", ("global",)),
    "speed": ParameterRule("rejected", "there is only one speed", "", ("standard",)),
    "diagnostics": ParameterRule("rejected", "diagnostics are not available; use `cellama status`"),
    "thread": ParameterRule("rejected", "the gateway doesn't store conversations; send all messages"),
    "container": ParameterRule(
        "rejected", "the gateway doesn't run tools; define `tools`, and run them in your program"
    ),
    "mcp_servers": ParameterRule(
        "rejected", "the gateway doesn't run tools; define `tools`, and run them in your program", "", ([],)
    ),
    "context_management": ParameterRule(
        "rejected",
        "the gateway doesn't edit conversations; shorten them yourself. An edit that keeps all reasoning is accepted, "
        "because this is the default",
        harmless=({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    ),
    "n": ParameterRule("rejected", "a response is a single message", "", (1,)),
    "logprobs": ParameterRule("rejected", "messages have no field for log probabilities; use /v1/chat/completions"),
    "return_tokens": ParameterRule("rejected", "messages have no field for tokens; use /tokenize", "", (False,)),
}
COUNTED = (  # the parameters that counting tokens accepts
    *("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "output_format"),
    *("cache_control", "speed", "user_profile_id", "workspace_id", "mcp_servers", "context_management"),
)
