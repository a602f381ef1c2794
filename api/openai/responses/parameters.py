"""What becomes of each parameter of `/v1/responses`; what stands not here is one of jobs, or unknown."""

from __future__ import annotations

from collections.abc import Mapping

from cellama.api.openai.parameters import Rule

RESPONSES = "/v1/responses"
INCLUDABLE = ("message.output_text.logprobs", "reasoning.encrypted_content")  # the others are ignored: no such items
_SHARED = "prefixes are shared without being told"
_WHO = "the tenant of the key is who asks"

RULES: Mapping[str, Rule] = {
    **{name: Rule("as it is") for name in ("model", "temperature", "top_p")},
    "input": Rule(
        "mapped",
        "a text, or items: messages, `function_call`, `function_call_output`, `reasoning`; items of built-in tools are "
        "skipped, images, audio, files and `item_reference` refused",
        "messages",
    ),
    "instructions": Rule("mapped", "a system message, for this response only"),
    "previous_response_id": Rule("mapped", "goes on after that response, with its context", "parent_key"),
    "max_output_tokens": Rule("renamed", "default: what the context has room for", "max_tokens"),
    "tools": Rule("mapped", "those of type `function`; others are skipped"),
    "tool_choice": Rule(
        "mapped", "`auto`, `none`, `required`, a function, whose call is then forced, or `allowed_tools`"
    ),
    "parallel_tool_calls": Rule("as it is", "not said: as many as the model makes"),
    "text": Rule("mapped", "`format`: as `response_format` of chats; `verbosity` is ignored", "json_schema"),
    "reasoning": Rule("mapped", "`effort`, to the chat template (`none`: no thinking); else ignored", "template_args"),
    "top_logprobs": Rule("mapped", "how many", "logprobs"),
    "include": Rule("mapped", " and ".join(f"`{name}`" for name in INCLUDABLE) + "; others are ignored"),
    "metadata": Rule("mapped", "up to 16 texts, shown in the answer"),
    "store": Rule("mapped", "default: true; false: its id is good for nothing afterwards"),
    "background": Rule("mapped", "goes on whoever goes away; needs `store`"),
    "stream": Rule("mapped", "server-sent events, numbered"),
    "stream_options": Rule("ignored", "there is no obfuscation"),
    "service_tier": Rule("mapped", "as of chats"),
    "prompt_cache_key": Rule("ignored", _SHARED),
    "prompt_cache_options": Rule("ignored", _SHARED),
    "prompt_cache_retention": Rule("ignored", _SHARED),
    "user": Rule("ignored", _WHO),
    "safety_identifier": Rule("ignored", _WHO),
    "client_metadata": Rule("ignored", "a coding client sends it"),
    "max_tool_calls": Rule("ignored", "it counts calls of built-in tools, and there are none"),
    "truncation": Rule("refused", "a prompt that is too long is an error", harmless=("disabled",)),
    "conversation": Rule("refused", "use `previous_response_id`"),
    "prompt": Rule("refused", "there are no stored prompts; send `instructions` and `input`"),
    "context_management": Rule("refused", "there is no compaction", harmless=([],)),
    "moderation": Rule("refused", "there is no moderation"),
    "n": Rule("refused", "a response has one answer", harmless=(1,)),
    "messages": Rule("refused", "use `input`"),
    "system": Rule("refused", "use `instructions`"),
    "max_tokens": Rule("refused", "use `max_output_tokens`"),
    "parent_key": Rule("refused", "use `previous_response_id`"),
    "cache_prompt": Rule("refused", "a response can be gone on from", harmless=(True,)),
    "priority": Rule("refused", "use `service_tier`"),
    "cache_scope": Rule("refused", "use `cache_salt`"),
}
