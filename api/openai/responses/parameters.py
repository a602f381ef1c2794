"""What becomes of each parameter of `/v1/responses`; what stands not here is one of jobs, or unknown."""

from __future__ import annotations

from collections.abc import Mapping

from cellama.api.openai.parameters import ParameterRule

RESPONSES = "/v1/responses"
INCLUDABLE = ("message.output_text.logprobs", "reasoning.encrypted_content")  # the others are ignored: no such items
_SHARED = "prefixes are shared without being told"
_WHO = "the tenant of the key is who asks"

RULES: Mapping[str, ParameterRule] = {
    **{name: ParameterRule("as it is") for name in ("model", "temperature", "top_p")},
    "input": ParameterRule(
        "mapped",
        "a text, or items: messages, `function_call`, `function_call_output`, `reasoning`; items of built-in tools are "
        "skipped, images, audio, files and `item_reference` refused",
        "messages",
    ),
    "instructions": ParameterRule("mapped", "a system message, for this response only"),
    "previous_response_id": ParameterRule("mapped", "goes on after that response, with its context", "parent_key"),
    "max_output_tokens": ParameterRule("renamed", "default: what the context has room for", "max_tokens"),
    "tools": ParameterRule("mapped", "those of type `function`; others are skipped"),
    "tool_choice": ParameterRule(
        "mapped", "`auto`, `none`, `required`, a function, whose call is then forced, or `allowed_tools`"
    ),
    "parallel_tool_calls": ParameterRule("as it is", "not said: as many as the model makes"),
    "text": ParameterRule("mapped", "`format`: as `response_format` of chats; `verbosity` is ignored", "json_schema"),
    "reasoning": ParameterRule(
        "mapped", "`effort`, to the chat template (`none`: no thinking); else ignored", "template_args"
    ),
    "top_logprobs": ParameterRule("mapped", "how many", "logprobs"),
    "include": ParameterRule("mapped", " and ".join(f"`{name}`" for name in INCLUDABLE) + "; others are ignored"),
    "metadata": ParameterRule("mapped", "up to 16 texts, shown in the answer"),
    "store": ParameterRule("mapped", "default: true; false: its id is good for nothing afterwards"),
    "background": ParameterRule("mapped", "goes on whoever goes away; needs `store`"),
    "stream": ParameterRule("mapped", "server-sent events, numbered"),
    "stream_options": ParameterRule("ignored", "there is no obfuscation"),
    "service_tier": ParameterRule("mapped", "as of chats"),
    "prompt_cache_key": ParameterRule("ignored", _SHARED),
    "prompt_cache_options": ParameterRule("ignored", _SHARED),
    "prompt_cache_retention": ParameterRule("ignored", _SHARED),
    "user": ParameterRule("ignored", _WHO),
    "safety_identifier": ParameterRule("ignored", _WHO),
    "client_metadata": ParameterRule("ignored", "a coding client sends it"),
    "max_tool_calls": ParameterRule("ignored", "it counts calls of built-in tools, and there are none"),
    "truncation": ParameterRule("refused", "a prompt that is too long is an error", harmless=("disabled",)),
    "conversation": ParameterRule("refused", "use `previous_response_id`"),
    "prompt": ParameterRule("refused", "there are no stored prompts; send `instructions` and `input`"),
    "context_management": ParameterRule("refused", "there is no compaction", harmless=([],)),
    "moderation": ParameterRule("refused", "there is no moderation"),
    "n": ParameterRule("refused", "a response has one answer", harmless=(1,)),
    "messages": ParameterRule("refused", "use `input`"),
    "system": ParameterRule("refused", "use `instructions`"),
    "max_tokens": ParameterRule("refused", "use `max_output_tokens`"),
    "parent_key": ParameterRule("refused", "use `previous_response_id`"),
    "cache_prompt": ParameterRule("refused", "a response can be gone on from", harmless=(True,)),
    "priority": ParameterRule("refused", "use `service_tier`"),
    "cache_scope": ParameterRule("refused", "use `cache_salt`"),
}
