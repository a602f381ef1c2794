"""Define how each of Ollama's parameters and options is handled. The documentation is generated from these tables.

A parameter that is not in a table must be a job parameter (docs/reference/parameters.md). All other parameters are
rejected. Options that are not in `OPTIONS` are also rejected.
"""

from __future__ import annotations

from collections.abc import Mapping

from cellama.api.openai.parameters import ParameterRule

CHAT, GENERATE, EMBED, EMBEDDINGS = "/api/chat", "/api/generate", "/api/embed", "/api/embeddings"

_TEXT_ONLY = "models can only process text; remove images"
_COMMON = {
    "model": ParameterRule("mapped", "the tag `:latest` can be omitted or added"),
    "keep_alive": ParameterRule(
        "mapped",
        "time after which an on-demand model is unloaded if it stays idle, as a number of seconds or a duration such "
        "as `5m`. Negative values keep the model loaded. Other models always stay loaded",
        "keep_alive_s",
    ),
    "service_tier": ParameterRule("mapped", "same as in OpenAI's API"),
    "priority": ParameterRule("rejected", "use `service_tier`"),
}
_GENERATION = {
    **_COMMON,
    "cache_salt": ParameterRule("mapped", "same as in OpenAI's API"),
    "cache_scope": ParameterRule("rejected", "use `cache_salt`"),
    "stream": ParameterRule("mapped", "newline-delimited JSON; default: true"),
    "options": ParameterRule("mapped", "the table of options shows how each option is handled"),
    "format": ParameterRule(
        "mapped",
        "`json` or a JSON Schema. Keywords that can't be enforced are ignored and listed in `warnings`. With "
        "`strict_schema: true`, they are rejected",
        "json_schema",
    ),
    "think": ParameterRule(
        "mapped",
        "true, false, or a level (`low`, `medium`, `high`, `max`), which the chat template receives as "
        "`reasoning_effort`; default: the template decides",
        "enable_thinking",
    ),
    "logprobs": ParameterRule("mapped", "enables log probabilities"),
    "top_logprobs": ParameterRule(
        "mapped", "number of alternatives per token, up to 20; requires `logprobs`", "logprobs"
    ),
    "truncate": ParameterRule("rejected", "a prompt that is too long causes an error", harmless=(False,)),
    "shift": ParameterRule("rejected", "answers end when the context is full", harmless=(False,)),
    "n": ParameterRule("rejected", "an answer is a single text", harmless=(1,)),
    "return_tokens": ParameterRule("rejected", "answers have no field for tokens; use /tokenize", harmless=(False,)),
    "_debug_render_only": ParameterRule(
        "rejected", "prompts are rendered on workers; use /tokenize with `messages`", harmless=(False,)
    ),
}
PARAMETERS: Mapping[str, Mapping[str, ParameterRule]] = {
    CHAT: {
        **_GENERATION,
        "messages": ParameterRule(
            "mapped",
            "`thinking` becomes `reasoning`. The result of a tool belongs to a call by its `tool_call_id`, its "
            "`tool_name` or its position. Images are rejected. Without messages, the answer reports that the model is "
            "loaded",
            "messages",
        ),
        "tools": ParameterRule("unchanged"),
    },
    GENERATE: {
        **_GENERATION,
        "prompt": ParameterRule(
            "mapped",
            "rendered by the chat template as a user message, unless `raw` is set or the model has no chat template. "
            "If it is empty, the answer reports that the model is loaded",
            "messages",
        ),
        "system": ParameterRule("mapped", "a system message; requires a chat template", "messages"),
        "raw": ParameterRule("mapped", "continues `prompt` without the chat template"),
        "suffix": ParameterRule(
            "mapped",
            "the text after the gap to fill. The chat template is not used. Only for models with tokens to fill in the "
            "middle of a text",
        ),
        "template": ParameterRule(
            "rejected",
            "the model's own chat template is used; format the prompt yourself, and set `raw`",
            harmless=("",),
        ),
        "context": ParameterRule("rejected", "it is deprecated; send the conversation to `/api/chat`", harmless=([],)),
        "images": ParameterRule("rejected", _TEXT_ONLY, harmless=([],)),
        "messages": ParameterRule("rejected", "use `/api/chat`"),
        "tools": ParameterRule("rejected", "use `/api/chat`", harmless=([],)),
        **{
            name: ParameterRule("rejected", "models can only generate text; leave it out")
            for name in ("width", "height", "steps")
        },
    },
    EMBED: {
        **_COMMON,
        "input": ParameterRule("renamed", "a text or a list of texts", "texts"),
        "truncate": ParameterRule("unchanged", "default: true"),
        "dimensions": ParameterRule("unchanged"),
        "options": ParameterRule("ignored", "vectors don't depend on them"),
        "encoding": ParameterRule("rejected", "vectors are lists of numbers; use /v1/embeddings", harmless=("list",)),
    },
    EMBEDDINGS: {
        **_COMMON,
        "prompt": ParameterRule("renamed", "a text", "texts"),
        "options": ParameterRule("ignored", "vectors don't depend on them"),
        "encoding": ParameterRule("rejected", "vectors are lists of numbers; use /v1/embeddings", harmless=("list",)),
    },
}

_OF_WORKERS = ParameterRule("ignored", "set by the model's settings on its workers")
OPTIONS: Mapping[str, ParameterRule] = {
    "num_predict": ParameterRule(
        "renamed", "a negative number means the rest of the context, which is also the default", "max_tokens"
    ),
    **{
        name: ParameterRule("unchanged")
        for name in ("temperature", "top_p", "min_p", "typical_p", "repeat_penalty", "presence_penalty", "stop")
    },
    **{name: ParameterRule("unchanged") for name in ("frequency_penalty", "mirostat", "mirostat_tau", "mirostat_eta")},
    "seed": ParameterRule(
        "mapped", "-1 means a random seed. Other negative seeds are mapped into the range that jobs accept", "seed"
    ),
    "top_k": ParameterRule("mapped", "a negative number keeps all tokens, as does 0", "top_k"),
    "repeat_last_n": ParameterRule("mapped", "-1 means the whole context", "repeat_last_n"),
    "num_ctx": ParameterRule("ignored", "`ctx_per_slot` in the model's settings determines the context length"),
    "num_keep": ParameterRule("ignored", "answers end when the context is full"),
    **{name: ParameterRule("ignored", "removed from llama.cpp") for name in ("penalize_newline", "tfs_z")},
    **dict.fromkeys(("num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv"), _OF_WORKERS),
    **dict.fromkeys(("logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only"), _OF_WORKERS),
    "draft_num_predict": _OF_WORKERS,
}
