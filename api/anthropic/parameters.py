"""What becomes of each of Anthropic's parameters: the table from which the docs are made, too.

A parameter that does not stand here is one of jobs (docs/reference/parameters.md), or unknown, and then refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from cellama.api.openai.parameters import ParameterRule

MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"

PARAMETERS: Mapping[str, ParameterRule] = {
    "model": ParameterRule("as it is"),
    "max_tokens": ParameterRule("as it is", "must be given"),
    "messages": ParameterRule(
        "mapped",
        "blocks `text`, `tool_use`, `tool_result` and `thinking`; texts are joined by an empty line",
        "messages",
    ),
    "system": ParameterRule(
        "mapped", "a text or blocks; a line `x-anthropic-billing-header: …` at its head is left out", "messages"
    ),
    "stop_sequences": ParameterRule("renamed", to="stop"),
    "temperature": ParameterRule("as it is"),
    "top_p": ParameterRule("as it is"),
    "top_k": ParameterRule("as it is"),
    "stream": ParameterRule("mapped", "server-sent events"),
    "tools": ParameterRule("mapped", "of type `custom`; those that Anthropic runs or has trained are refused", "tools"),
    "tool_choice": ParameterRule("mapped", "`auto`, `any`, `tool`, `none`; `disable_parallel_tool_use`", "tool_choice"),
    "thinking": ParameterRule(
        "mapped",
        "`enabled` with `budget_tokens`, `adaptive`, `disabled`; not given: disabled. `display: omitted` leaves a "
        "thought and its signature empty",
        "enable_thinking",
    ),
    "output_config": ParameterRule(
        "mapped",
        "`effort` goes to the chat template. `format` has a schema: keywords that can't be enforced are ignored and "
        "listed in `warnings`, because Anthropic's clients move such keywords into descriptions before they send a "
        "schema. `strict_schema: true` refuses them",
        "json_schema",
    ),
    "output_format": ParameterRule("refused", "it was renamed: use `output_config.format`"),
    "service_tier": ParameterRule(
        "mapped",
        "`auto` is the key's, `standard_only` at most `default`; OpenAI's `flex`, `default` and `priority`, too. The "
        "usage says `batch`, `standard` or `priority`",
    ),
    "cache_control": ParameterRule("ignored", "prefixes are shared without being told, also of blocks and tools"),
    "metadata": ParameterRule("ignored", "the tenant of the key is who asks"),
    "user_profile_id": ParameterRule("ignored", "the tenant of the key is who asks"),
    "workspace_id": ParameterRule("ignored", "the tenant of the key is who asks"),
    "inference_geo": ParameterRule("refused", "your workers are where they are", "", ("global",)),
    "speed": ParameterRule("refused", "there is one speed", "", ("standard",)),
    "diagnostics": ParameterRule("refused", "there are none; see `cellama status`"),
    "thread": ParameterRule(
        "refused", "no conversation is held here: send all of it; the client's tool runner then does so"
    ),
    "container": ParameterRule("refused", "nothing is run for the model; give it tools"),
    "mcp_servers": ParameterRule("refused", "nothing is run for the model; give it tools", "", ([],)),
    "context_management": ParameterRule(
        "refused",
        "a conversation is read as it is sent; cut it before. Keeping all thoughts is taken, for that is so",
        harmless=({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    ),
    "n": ParameterRule("refused", "an answer is one message", "", (1,)),
    "logprobs": ParameterRule("refused", "the answer has no place for them; use /v1/chat/completions"),
    "return_tokens": ParameterRule("refused", "the answer has no place for them; use /tokenize", "", (False,)),
}
COUNTED = (  # what counting tokens takes of it
    *("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "output_format"),
    *("cache_control", "speed", "user_profile_id", "workspace_id", "mcp_servers", "context_management"),
)
