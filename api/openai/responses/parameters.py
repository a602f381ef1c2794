"""Define how each parameter of `/v1/responses` is handled.

Parameters that are not listed are either job parameters or unknown.
"""

from __future__ import annotations

from collections.abc import Mapping

from cellama.api.openai.parameters import ParameterRule

RESPONSES = "/v1/responses"
INPUT_TOKENS, COMPACT = f"{RESPONSES}/input_tokens", f"{RESPONSES}/compact"
INCLUDABLE = (  # other values are ignored, because responses have no such items
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
)
_SHARED = "prefixes are always shared"
_USER = "users are identified by tenant unless `gateway_user_shares` is set"

RULES: Mapping[str, ParameterRule] = {
    **{name: ParameterRule("unchanged") for name in ("model", "temperature", "top_p")},
    "input": ParameterRule(
        "mapped",
        "a text, or items: messages, `function_call`, `function_call_output`, `reasoning`, `compaction`, and "
        "`item_reference` for an item of a stored response; items of built-in tools are skipped; images, audio and "
        "files are rejected",
        "messages",
    ),
    "instructions": ParameterRule("mapped", "a system message for this response only"),
    "previous_response_id": ParameterRule("mapped", "continues the context of that response", "parent_key"),
    "max_output_tokens": ParameterRule("renamed", "default: the rest of the context", "max_tokens"),
    "tools": ParameterRule(
        "mapped",
        "tools of type `function` and `namespace`, whose functions the model sees as `NAMESPACE__NAME`; other tools "
        "are skipped and listed in `warnings`",
    ),
    "tool_choice": ParameterRule(
        "mapped", "`auto`, `none`, `required`, `allowed_tools`, or a function that the model must call"
    ),
    "parallel_tool_calls": ParameterRule("unchanged", "default: as many calls as the model makes"),
    "text": ParameterRule(
        "mapped", "`format` works like `response_format` of chats; `verbosity` is ignored", "json_schema"
    ),
    "reasoning": ParameterRule(
        "mapped",
        "`effort` works like `reasoning_effort` of chats; other members are ignored",
        "template_args",
    ),
    "top_logprobs": ParameterRule("mapped", "number of alternatives per token, up to 20", "logprobs"),
    "include": ParameterRule("mapped", " and ".join(f"`{name}`" for name in INCLUDABLE) + "; other values are ignored"),
    "metadata": ParameterRule("mapped", "up to 16 strings, which the response repeats"),
    "store": ParameterRule("mapped", "default: true; if false, the response can't be retrieved by its id"),
    "background": ParameterRule("mapped", "continues if the client disconnects; requires `store`"),
    "stream": ParameterRule("mapped", "numbered server-sent events"),
    "stream_options": ParameterRule("ignored", "obfuscation is not available"),
    "service_tier": ParameterRule("mapped", "same as in chats"),
    "prompt_cache_key": ParameterRule("ignored", _SHARED),
    "prompt_cache_options": ParameterRule("ignored", _SHARED),
    "prompt_cache_retention": ParameterRule("ignored", _SHARED),
    "user": ParameterRule("ignored", _USER),
    "safety_identifier": ParameterRule("ignored", _USER),
    "client_metadata": ParameterRule("ignored", "coding clients send it, but it has no effect"),
    "max_tool_calls": ParameterRule("ignored", "it limits calls to built-in tools, which are not available"),
    "truncation": ParameterRule("rejected", "a prompt that is too long causes an error", harmless=("disabled",)),
    "conversation": ParameterRule("rejected", "use `previous_response_id`"),
    "prompt": ParameterRule("rejected", "prompts are not stored; send `instructions` and `input`"),
    "context_management": ParameterRule(
        "rejected", "conversations are not compacted automatically; use /v1/responses/compact", harmless=([],)
    ),
    "moderation": ParameterRule("rejected", "moderation is not available"),
    "n": ParameterRule("rejected", "a response has one answer", harmless=(1,)),
    "messages": ParameterRule("rejected", "use `input`"),
    "system": ParameterRule("rejected", "use `instructions`"),
    "max_tokens": ParameterRule("rejected", "use `max_output_tokens`"),
    "n_predict": ParameterRule("rejected", "use `max_output_tokens`"),
    "parent_key": ParameterRule("rejected", "use `previous_response_id`"),
    "cache_prompt": ParameterRule(
        "rejected", "a response's context is always cached so that it can be continued", harmless=(True,)
    ),
    "priority": ParameterRule("rejected", "use `service_tier`"),
    "cache_scope": ParameterRule("rejected", "use `cache_salt`"),
}
_CONVERSATION = ("model", "input", "instructions", "previous_response_id", "cache_salt")
COUNTED = (  # the parameters that counting tokens accepts
    *_CONVERSATION,
    *("tools", "tool_choice", "parallel_tool_calls", "reasoning", "text", "truncation", "conversation"),
    *("template_args", "enable_thinking"),
)
COMPACTED = (  # the parameters that compaction accepts
    *_CONVERSATION,
    *("service_tier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
)
