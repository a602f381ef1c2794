"""Define how each parameter of `/v1/responses` is handled. Other parameters are parameters of jobs, or unknown."""

from __future__ import annotations

from collections.abc import Mapping

from cellama.api.openai.parameters import ParameterRule

RESPONSES = "/v1/responses"
INCLUDABLE = (  # other values are ignored, because responses have no such items
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
)
_SHARED = "prefixes are always shared"
_USER = "the tenant of the API key identifies the user"

RULES: Mapping[str, ParameterRule] = {
    **{name: ParameterRule("unchanged") for name in ("model", "temperature", "top_p")},
    "input": ParameterRule(
        "mapped",
        "a text, or items: messages, `function_call`, `function_call_output`, `reasoning`; items of built-in tools are "
        "skipped; images, audio, files and `item_reference` are refused",
        "messages",
    ),
    "instructions": ParameterRule("mapped", "a system message, for this response only"),
    "previous_response_id": ParameterRule("mapped", "continues that response with its context", "parent_key"),
    "max_output_tokens": ParameterRule("renamed", "default: the rest of the context", "max_tokens"),
    "tools": ParameterRule("mapped", "type `function`; others are skipped"),
    "tool_choice": ParameterRule(
        "mapped", "`auto`, `none`, `required`, a function, whose call is then forced, or `allowed_tools`"
    ),
    "parallel_tool_calls": ParameterRule("unchanged", "default: as many calls as the model makes"),
    "text": ParameterRule("mapped", "`format`: as `response_format` of chats; `verbosity` is ignored", "json_schema"),
    "reasoning": ParameterRule(
        "mapped", "the chat template receives `effort` (`none` disables thinking); the rest is ignored", "template_args"
    ),
    "top_logprobs": ParameterRule("mapped", "their number", "logprobs"),
    "include": ParameterRule("mapped", " and ".join(f"`{name}`" for name in INCLUDABLE) + "; others are ignored"),
    "metadata": ParameterRule("mapped", "up to 16 texts, which the answer repeats"),
    "store": ParameterRule("mapped", "default: true; with false, its id can't be used afterwards"),
    "background": ParameterRule("mapped", "continues if the client disconnects; requires `store`"),
    "stream": ParameterRule("mapped", "server-sent events, numbered"),
    "stream_options": ParameterRule("ignored", "obfuscation is not available"),
    "service_tier": ParameterRule("mapped", "as for chats"),
    "prompt_cache_key": ParameterRule("ignored", _SHARED),
    "prompt_cache_options": ParameterRule("ignored", _SHARED),
    "prompt_cache_retention": ParameterRule("ignored", _SHARED),
    "user": ParameterRule("ignored", _USER),
    "safety_identifier": ParameterRule("ignored", _USER),
    "client_metadata": ParameterRule("ignored", "coding clients send it"),
    "max_tool_calls": ParameterRule("ignored", "it counts calls of built-in tools, which are not available"),
    "truncation": ParameterRule("refused", "a prompt that is too long is an error", harmless=("disabled",)),
    "conversation": ParameterRule("refused", "use `previous_response_id`"),
    "prompt": ParameterRule("refused", "prompts are not stored; send `instructions` and `input`"),
    "context_management": ParameterRule("refused", "compaction is not available", harmless=([],)),
    "moderation": ParameterRule("refused", "moderation is not available"),
    "n": ParameterRule("refused", "a response has one answer", harmless=(1,)),
    "messages": ParameterRule("refused", "use `input`"),
    "system": ParameterRule("refused", "use `instructions`"),
    "max_tokens": ParameterRule("refused", "use `max_output_tokens`"),
    "parent_key": ParameterRule("refused", "use `previous_response_id`"),
    "cache_prompt": ParameterRule("refused", "a response can be continued", harmless=(True,)),
    "priority": ParameterRule("refused", "use `service_tier`"),
    "cache_scope": ParameterRule("refused", "use `cache_salt`"),
}
