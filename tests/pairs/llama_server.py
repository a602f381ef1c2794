"""Pairs from the tests of llama.cpp's server (tools/server/tests/unit).

Our requests name a model, because cellama requires one. Expectations about the texts of llama.cpp's test models are
left out. Options of the server's command line are tested elsewhere.
"""

from __future__ import annotations

import re
from typing import Any

from . import ABSENT, Ask, Difference, Pair, Table
from .asks import (
    BOOK,
    BOTH,
    PIXEL,
    TINY,
    anthropic_tool,
    are_vectors,
    called,
    chat,
    complete,
    embed,
    in_order,
    is_unit,
    message,
    native,
    near,
    no_calls,
    rank,
    rejected,
    respond,
    tool,
    unpacked,
)

LIFE = "I believe the meaning of life is"
CODING = [{"role": "system", "content": "You are a coding assistant."}, {"role": "user", "content": "Write an example"}]
LOREM = "Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed do eiusmod tempor incididunt ut labore. " * 120
WORDS = ("i", "I", "the", "The", "to", "a", "an", "be", "is", "was", "but", "and", "so", "you", "he", "she", "we", "it")
TEST_TOOL = tool("test", "success", {"type": "boolean", "const": True})
PYTHON_TOOL = tool("python", "code", {"type": "string", "maxLength": 12})
WEATHER_TOOL = tool("get_current_weather", "location", {"type": "string", "maxLength": 12})
CALCULATED = [
    {"role": "system", "content": "You use tools, and round to two decimals."},
    {"role": "user", "content": "What is the sine of 30 degrees?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_6789",
                "type": "function",
                "function": {"name": "calculate", "arguments": '{"expression":"sin(30 * pi / 180)"}'},
            }
        ],
    },
    {"role": "tool", "name": "calculate", "content": "0.5", "tool_call_id": "call_6789"},
]
WEATHER_RESULT = [
    {"role": "user", "content": "What is the weather?"},
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"location": "Paris"}}],
    },
]

DIFFERENCES = {
    "model": Difference(
        "a request without `model`, or with the name of another model, is answered by the loaded model",
        "400 without `model`, and 404 `model_not_found` for an unknown name, because a gateway serves several models",
        "the id, an alias (setting `model_aliases`), or `:default`",
    ),
    "native": Difference(
        "`POST /completion`, `/completions`, `/embedding` and `/embeddings` have formats of their own, with `content`, "
        "`timings`, `truncated` and `generation_settings`",
        "`/completion` and `/embedding` are 404. `/completions` and `/embeddings` have OpenAI's format, because they "
        "are the usual paths of clients whose base URL lacks `/v1`",
        "the fields `text`, `usage` and `finish_reason`",
    ),
    "admin": Difference(
        "`GET /props`, `/slots` and `/lora-adapters` show the state of one process",
        "404, because many workers serve one gateway",
        "`GET /v1/models`, `cellama status`, `cellama top`, `cellama models adapter`",
    ),
    "slots": Difference(
        "`POST /slots/{id}?action=save` and `restore` store the cache of a slot, which `id_slot` selects",
        "404. States are stored and loaded automatically, and the engine finds the slot with the longest prefix",
        "the model setting `cache_dir`",
    ),
    "lora": Difference(
        '`lora: [{"id": 0, "scale": 0.5}]` sets the scale of an adapter',
        "400 that names the parameter, because numbers of adapters differ between workers",
        '`adapters: {"NAME": 0.5}`',
    ),
    "web": Difference(
        "`GET /` is a web page",
        "JSON that names the APIs. Browsers are redirected to the console, which has a path of its own",
        "`/console`",
    ),
    "cors": Difference(
        "pages of every origin may send requests",
        "by default none, because any web page could use a gateway on the same machine",
        "the setting `gateway_cors_origins`",
    ),
    "response_fields": Difference(
        "`response_fields` selects the fields of the reply",
        "400 that names the parameter, because the formats of OpenAI and Anthropic are fixed",
        "select the fields in your program",
    ),
    "n_probs": Difference(
        "`n_probs` adds `completion_probabilities`, and `post_sampling_probs` those after all samplers",
        "400 that names `logprobs`, which are always of the model's distribution, as in OpenAI's API",
        "`logprobs` (with `top_logprobs` for chats)",
    ),
    "mixed_prompt": Difference(
        "one prompt may mix texts and token ids",
        "400, because special tokens at the borders would be ambiguous",
        "tokenize the texts with `/tokenize`, and send token ids only",
    ),
    "text_bias": Difference(
        "keys of `logit_bias` may be texts, whose tokens all get the bias",
        "400, because a text has different tokens in different places",
        "token ids from `/tokenize`",
    ),
    "verbose": Difference(
        "with `--verbose`, replies have `__verbose` with the rendered prompt",
        "the field is absent. Prompts are never logged or repeated",
        "`POST /tokenize` with `messages`, then `/detokenize`",
    ),
    "overflow": Difference(
        "a prompt that is too long gets the error type `exceed_context_size_error` with `n_ctx`",
        "400 with OpenAI's code `context_length_exceeded` and the text that OpenAI's clients recognize",
        "`error.code`",
    ),
    "context_shift": Difference(
        "with `--context-shift`, a prompt that is too long is truncated, and old tokens are dropped",
        "400. A truncated prompt gives wrong answers that look right",
        "a larger `ctx_per_slot`, or shorter messages",
    ),
    "progress": Difference(
        "`return_progress` and `timings_per_token` add `prompt_progress` and `timings` to streams",
        "these parameters are ignored",
        "the comments in streams while a job waits, and `usage` at the end",
    ),
    "resume": Difference(
        "`GET` and `DELETE /v1/stream` with `X-Conversation-Id` resume and stop a stream",
        "404. Streams of responses can be read again from any event",
        "`/v1/responses` with `background`, `starting_after` and `POST …/cancel`",
    ),
    "images": Difference(
        "models with a projector accept images and audio",
        "400, because models only accept text",
        "another server for images",
    ),
    "no_messages": Difference(
        "`/v1/messages` with an empty list of messages is answered",
        "400, as in Anthropic's API",
        "at least one message",
    ),
    "object_input": Difference(
        "the input of embeddings may be objects with `prompt_string` or `content`",
        "400. OpenAI's format has only texts and token ids",
        "the text itself",
    ),
    "empty_input": Difference(
        "an empty text has a vector",
        "400, because a text without tokens has no vector",
        "leave empty texts out",
    ),
    "tei": Difference(
        "`/rerank` with `texts` returns a list in the format of Text Embeddings Inference",
        "400 that names the parameter",
        "`documents`, in the format of Jina and Cohere",
    ),
    "apply_template": Difference(
        "`POST /apply-template` returns the rendered prompt",
        "404",
        "`POST /tokenize` with `messages`, then `/detokenize`",
    ),
}
CREATED: dict[str, Any] = {
    "choices.0.finish_reason": "length",
    "usage.completion_tokens": 8,
    "usage.prompt_tokens": int,
}

BASICS = [
    Pair("basic: health", Ask("/health", method="GET")),
    Pair("basic: models", Ask("/v1/models", method="GET"), {"data.*.id": lambda ids: "tiny" in ids}),
    Pair(
        "basic: request without model",
        Ask("/v1/completions", {"prompt": LIFE}),
        rejected("model"),
        400,
        differs="model",
    ),
    Pair(
        "basic: name of another model",
        chat(model="gpt-3.5-turbo-instruct"),
        {"error.code": "model_not_found"},
        404,
        differs="model",
    ),
    Pair("basic: props", Ask("/props", method="GET"), {}, 404, differs="admin"),
    Pair("basic: slots", Ask("/slots", method="GET"), {}, 404, differs="admin"),
    Pair("lora: adapters", Ask("/lora-adapters", method="GET"), {}, 404, differs="admin"),
    Pair("slot_save: save a slot", Ask("/slots/1?action=save", {"filename": "a.bin"}), {}, 404, differs="slots"),
    Pair("slot_save: restore a slot", Ask("/slots/1?action=restore", {"filename": "a.bin"}), {}, 404, differs="slots"),
    Pair("slot_save: erase a slot", Ask("/slots/1?action=erase", {}), {}, 404, differs="slots"),
    Pair("lora: scale of an adapter", complete(lora=[{"id": 0, "scale": 0.5}]), rejected("lora"), 400, differs="lora"),
    Pair("basic: web page", Ask("/", method="GET"), {"service": "cellama"}, differs="web"),
    Pair("security: health needs no key", Ask("/health", method="GET", key="")),
    *[
        Pair(f"security: {name}", Ask(path, body, key=key), {"error.type": "authentication_error"}, 401)
        for name, path, body, key in (
            ("missing key", "/v1/completions", complete().body, ""),
            ("invalid key", "/v1/completions", complete().body, "sk-invalid"),
        )
    ],
    Pair("security: valid key", Ask("/v1/completions", complete().body, key="valid"), {"text": str}),
    Pair("security: valid key in X-Api-Key", Ask("/v1/messages", message().body, key="x-api-key"), {"type": "message"}),
    Pair(
        "security: preflight of a page",
        Ask(
            "/v1/completions",
            method="OPTIONS",
            headers={"origin": "web.mydomain.fr", "access-control-request-method": "POST"},
        ),
        {"headers.access-control-allow-origin": ABSENT},
        405,
        differs="cors",
    ),
]
COMPLETIONS = [
    Pair("completion: native path", native("/completion", prompt=LIFE, n_predict=8), {}, 404, differs="native"),
    Pair(
        "completion: native path, list",
        native("/completions", prompt=LIFE, n_predict=8),
        {"content": ABSENT, "choices.#": 1},
        differs="native",
    ),
    Pair(
        "completion: n_predict",
        Ask("/v1/completions", {**TINY, "prompt": LIFE, "n_predict": 8, "ignore_eos": True}),
        CREATED,
    ),
    Pair(
        "completion: max_tokens",
        complete(),
        CREATED | {"id": re.compile("^cmpl"), "object": "text_completion", "text": str},
    ),
    Pair(
        "completion: long answer",
        complete("Write a joke about AI", max_tokens=64, ignore_eos=True),
        CREATED | {"usage.completion_tokens": 64},
    ),
    Pair(
        "completion: stream",
        complete(stream=True),
        {"events.-1.choices.0.finish_reason": "length", "events.*.id": lambda ids: len(set(ids)) == 1},
    ),
    Pair(
        "completion: stream equals the reply",
        complete(stream=True),
        lambda whole: {"text": whole.text},
        before=[complete()],
    ),
    Pair(
        "completion: stream with stop strings",
        complete(
            "System: Be kind.\nUser:\nTell me a joke.\nAssistant:\n",
            stop=["User:\n", "Assistant:\n"],
            max_tokens=40,
            stream=True,
        ),
        {"text": lambda text: "User:\n" not in text and "Assistant:\n" not in text},
    ),
    Pair(
        "completion: same seed",
        complete(seed=42, cache_prompt=False),
        lambda *before: {"text": before[0].text},
        before=[complete(seed=42, cache_prompt=False)] * 2,
    ),
    Pair(
        "completion: other seed",
        complete(seed=3, temperature=1, max_tokens=16),
        lambda other: {"text": lambda text: text != other.text},
        before=[complete(seed=1, temperature=1, max_tokens=16)],
    ),
    Pair(
        "completion: token ids",
        lambda ids: complete(ids.body["tokens"]),
        lambda _: {"text": str},
        before=[native("/tokenize", content=LIFE, add_special=True)],
    ),
    Pair(
        "completion: two lists of token ids",
        lambda ids: complete([ids.body["tokens"]] * 2),
        lambda _: {"choices.#": 2, "choices.*.text": lambda texts: texts[0] == texts[1]},
        before=[native("/tokenize", content=LIFE, add_special=True)],
    ),
    Pair(
        "completion: token ids and a text",
        lambda ids: complete([ids.body["tokens"], LIFE]),
        lambda _: {"choices.#": 2, "choices.*.text": lambda texts: texts[0] == texts[1]},
        before=[native("/tokenize", content=LIFE, add_special=True)],
    ),
    Pair(
        "completion: token ids and texts in one prompt",
        complete([1, 2, 3, LIFE, 7, 8, LIFE]),
        rejected("prompt"),
        400,
        differs="mixed_prompt",
    ),
    Pair(
        "completion: six prompts at once",
        complete(
            [
                "Write a very long book.",
                "Write a poem.",
                "What is LLM?",
                "The sky is blue.",
                "Write lyrics.",
                "Write a joke.",
            ]
        ),
        {"choices.#": 6, "choices.*.text": str, "choices.*.index": lambda found: found == list(range(6))},
    ),
    Pair(
        "completion: response_fields",
        complete(response_fields=["content"]),
        rejected("response_fields"),
        400,
        differs="response_fields",
    ),
    *[
        Pair(f"completion: {name}", complete(**given), rejected(next(reversed(given))), 400, differs="n_probs")
        for name, given in (
            ("n_probs", {"n_probs": 10}),
            ("n_probs in a stream", {"stream": True, "n_probs": 10}),
            ("post_sampling_probs", {"post_sampling_probs": True}),
        )
    ],
    Pair(
        "completion: logprobs",
        complete(logprobs=10, max_tokens=5),
        {
            "choices.0.logprobs.tokens.#": 5,
            "choices.0.logprobs.top_logprobs.*.#": lambda found: all(number >= 9 for number in found),
            "choices.0.logprobs.token_logprobs": lambda found: all(value <= 0 for value in found),
        },
    ),
    Pair(
        "completion: logprobs in a stream",
        complete(logprobs=10, max_tokens=5, stream=True),
        {"events.0.choices.0.logprobs.tokens.#": int},
    ),
    Pair(
        "completion: logit_bias of token ids",
        lambda ids: complete(
            "What is the best book", max_tokens=32, logit_bias={str(token): -100 for token in ids.body["tokens"]}
        ),
        lambda _: {"text": lambda text: not any(f" {word} " in text for word in WORDS)},
        before=[native("/tokenize", content=f" {' '.join(WORDS)} ")],
    ),
    Pair(
        "completion: logit_bias as pairs of token ids",
        lambda ids: complete(
            "What is the best book", max_tokens=32, logit_bias=[[token, -100] for token in ids.body["tokens"]]
        ),
        lambda _: {"text": lambda text: not any(f" {word} " in text for word in WORDS)},
        before=[native("/tokenize", content=f" {' '.join(WORDS)} ")],
    ),
    Pair(
        "completion: logit_bias of texts",
        complete(logit_bias={" the ": -100}),
        rejected("logit_bias"),
        400,
        differs="text_bias",
    ),
    Pair(
        "completion: logit_bias as pairs of texts",
        complete(logit_bias=[[" the ", -100]]),
        rejected("logit_bias"),
        400,
        differs="text_bias",
    ),
    Pair(
        "completion: prompt cache",
        complete("Hello 1 " * 40, max_tokens=1),
        lambda first: {
            "usage.prompt_tokens": first.body["usage"]["prompt_tokens"],
            "usage.prompt_tokens_details.cached_tokens": lambda cached: cached > 20,
        },
        before=[complete("Hello 1 " * 40, max_tokens=1)],
    ),
    Pair(
        "ignore_eos: answer has all tokens",
        complete("Once upon a time", max_tokens=100, ignore_eos=True),
        CREATED | {"usage.completion_tokens": 100},
    ),
    Pair(
        "ctx_shift: n_predict of a short prompt",
        complete("Hi how are you", max_tokens=64, ignore_eos=True),
        CREATED | {"usage.completion_tokens": 64},
    ),
    Pair(
        "ctx_shift: no limit",
        complete("Hi how are you", n_predict=-1, max_tokens=None, stop=["e"]),
        {"choices.0.finish_reason": "stop"},
    ),
    Pair(
        "ctx_shift: prompt that is too long",
        complete(LOREM),
        {"error.code": "context_length_exceeded", "message": re.compile("maximum context length is")},
        400,
        differs="context_shift",
    ),
    Pair(
        "ctx_shift: stream until the limit",
        Ask("/v1/completions", {**TINY, "n_predict": 24, "prompt": "Once", "stream": True, "ignore_eos": True}),
        {"events.-1.choices.0.finish_reason": "length", "text": lambda text: len(text) > 0},
    ),
]
SCHEMAS: list[tuple[str, Any, str]] = [
    ("json_object with const", {"type": "json_object", "schema": {"const": "42"}}, '^"42"$'),
    (
        "json_object with items",
        {
            "type": "json_object",
            "schema": {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "maxItems": 2},
        },
        r"^\[",
    ),
    ("json_schema with const", {"type": "json_schema", "json_schema": {"schema": {"const": "foooooo"}}}, '^"foooooo"$'),
    ("json_object", {"type": "json_object"}, r"^\{"),
]
INVALID_MESSAGES: list[tuple[str, Any]] = [
    ("null", None),
    ("a text", "string"),
    ("a number", [123]),
    ("an empty object", [{}]),
    ("a number as role", [{"role": 123}]),
    ("a number as content", [{"role": "system", "content": 123}]),
    ("an empty second object", [{"role": "system", "content": "test"}, {}]),
    ("no role", [{"content": "hello"}]),
]
CHATS = [
    Pair("chat: path without /v1", Ask("/chat/completions", chat().body), CREATED),
    Pair(
        "chat: system and user",
        chat(),
        CREATED | {"id": re.compile("cmpl"), "choices.0.message.role": "assistant", "text": str},
    ),
    Pair(
        "chat: parts of text",
        chat(
            [
                BOOK[0],
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "the best book"}],
                },
            ]
        ),
        CREATED,
    ),
    Pair("chat: 128 tokens", chat(CODING, max_tokens=128, ignore_eos=True), CREATED | {"usage.completion_tokens": 128}),
    Pair(
        "chat: system_fingerprint",
        chat(),
        {"system_fingerprint": lambda found: found is None or isinstance(found, str)},
    ),
    Pair(
        "chat: stream",
        chat(stream=True),
        {
            "events.0.choices.0.delta.role": "assistant",
            "events.-1.choices.0.finish_reason": "length",
            "events.*.id": lambda ids: len(set(ids)) == 1,
            "events.-1.choices.0.delta.content": ABSENT,
        },
    ),
    Pair(
        "chat: role only in the first chunk",
        chat(stream=True),
        {"events": lambda events: not any("role" in event["choices"][0]["delta"] for event in events[1:])},
    ),
    Pair(
        "chat: usage in a stream",
        chat(stream=True, stream_options={"include_usage": True}),
        {"last.choices.#": 0, "last.usage.completion_tokens": int},
    ),
    Pair("chat: verbose reply", chat(), {"__verbose": ABSENT}, differs="verbose"),
    Pair(
        "chat: assistant message at the end",
        chat([*BOOK, {"role": "assistant", "content": "Quick"}]),
        {"text": lambda text: not text.startswith("Quick")},
    ),
    Pair(
        "chat: assistant parts at the end",
        chat(
            [*BOOK, {"role": "assistant", "content": [{"type": "text", "text": "Qu"}, {"type": "text", "text": "ick"}]}]
        ),
        lambda whole: {"text": whole.text},
        before=[chat([*BOOK, {"role": "assistant", "content": "Quick"}])],
    ),
    Pair(
        "chat: rendered prompt of a continued message",
        lambda ids: native("/detokenize", tokens=ids.body["tokens"]),
        lambda _: {"content": re.compile("Quick$")},
        before=[native("/tokenize", messages=[*BOOK, {"role": "assistant", "content": "Quick"}])],
    ),
    Pair("chat: apply-template", native("/apply-template", messages=BOOK), {}, 404, differs="apply_template"),
    Pair(
        "template: prompt of a chat",
        lambda ids: native("/detokenize", tokens=ids.body["tokens"]),
        lambda _: {"content": re.compile("What is the best book")},
        before=[native("/tokenize", messages=BOOK)],
    ),
    *[
        Pair(
            f"template: add_generation_prompt {given}",
            lambda other, given=given: native("/tokenize", messages=BOOK, add_generation_prompt=given),
            lambda other, given=given: {"count": lambda number: (number > other.body["count"]) == given},
            before=[native("/tokenize", messages=BOOK, add_generation_prompt=not given)],
        )
        for given in (False, True)
    ],
    *[
        Pair(f"template: tools {name}", native("/tokenize", messages=BOOK, tools=tools), {"count": int})
        for name, tools in (("null", None), ("empty", []), ("given", [TEST_TOOL]))
    ],
    *[
        Pair(f"chat: {name}", chat(CODING, response_format=given, max_tokens=40), {"text": re.compile(pattern)})
        for name, given, pattern in SCHEMAS
    ],
    *[
        Pair(
            f"chat: invalid response_format {number}", chat(CODING, response_format=given), {"error.message": str}, 400
        )
        for number, given in enumerate(
            (
                {"type": "sound"},
                {"type": "json_object", "schema": 123},
                {"type": "json_object", "schema": {"type": 123}},
                {"type": "json_object", "schema": {"type": "hiccup"}},
            )
        )
    ],
    Pair("chat: json_schema", chat(CODING, json_schema={"const": "42"}), {"text": '"42"'}),
    Pair(
        "chat: grammar",
        chat([{"role": "user", "content": "Does it matter?"}], grammar='root ::= "a"{5,5}'),
        {"text": "aaaaa"},
    ),
    *[
        Pair(f"chat: messages with {name}", chat(given), {"error.message": str}, 400)
        for name, given in INVALID_MESSAGES
    ],
    *[
        Pair(
            f"chat: {name}",
            chat(stream=True, **{name: True}),
            {"events": lambda events: not any({"timings", "prompt_progress"} & set(event) for event in events)},
            differs="progress",
        )
        for name in ("timings_per_token", "return_progress")
    ],
    Pair(
        "chat: logprobs",
        chat(max_tokens=5, logprobs=True, top_logprobs=10),
        {
            "choices.0.logprobs.content.*.logprob": lambda found: all(value <= 0 for value in found),
            "choices.0.logprobs.content.*.bytes": list,
            "choices.0.logprobs.content.*.top_logprobs.#": lambda found: all(found),
            "body": lambda body: (
                "".join(one["token"] for one in body["choices"][0]["logprobs"]["content"])
                == body["choices"][0]["message"]["content"]
            ),
        },
    ),
    Pair(
        "chat: logprobs in a stream",
        chat(max_tokens=5, logprobs=True, top_logprobs=10, stream=True),
        {
            "events": lambda events: (
                "".join(
                    one["token"]
                    for event in events
                    for one in (event["choices"][0].get("logprobs") or {"content": ()})["content"]
                )
                == "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
            )
        },
    ),
    Pair(
        "chat: logit_bias",
        lambda ids: chat(max_tokens=32, logit_bias={str(token): -100 for token in ids.body["tokens"]}),
        lambda _: {"text": lambda text: text and not any(f" {word} " in text for word in WORDS)},
        before=[native("/tokenize", content=f" {' '.join(WORDS)} ")],
    ),
    Pair(
        "chat: context size exceeded",
        chat(BOOK * 300),
        {"error.type": "invalid_request_error", "error.code": "context_length_exceeded"},
        400,
        differs="overflow",
    ),
    Pair(
        "chat: context size exceeded in a stream",
        chat(BOOK * 300, stream=True),
        {"error.type": "invalid_request_error", "error.code": "context_length_exceeded"},
        400,
        differs="overflow",
    ),
    Pair(
        "chat: two choices",
        chat(n=2, temperature=0.8, seed=42, ignore_eos=True),
        {"choices.#": 2, "choices.*.message.role": "assistant", "choices.*.finish_reason": "length"},
    ),
    Pair(
        "vision: image",
        chat(
            [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}],
                }
            ]
        ),
        rejected("text"),
        400,
        differs="images",
    ),
    Pair(
        "security: file as image",
        chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file://mtmd/test-1.jpeg"}}]}]),
        rejected("text"),
        400,
    ),
    Pair("audio: transcription", Ask("/v1/audio/transcriptions", {}), {}, 404, differs="images"),
    Pair("stream: resume a conversation", Ask("/v1/stream?conv_id=a", method="GET"), {}, 404, differs="resume"),
    Pair("stream: stop a conversation", Ask("/v1/stream?conv_id=a", method="DELETE"), {}, 404, differs="resume"),
]
TOOLS = [
    *[
        Pair(
            f"tool_call: {name} is required, {stream}",
            chat(
                CODING,
                max_tokens=120,
                tools=[given],
                tool_choice="required",
                parallel_tool_calls=False,
                stream=is_stream,
            ),
            called(name, argument, is_stream),
        )
        for name, given, argument in (
            ("test", TEST_TOOL, "success"),
            ("python", PYTHON_TOOL, "code"),
            ("get_current_weather", WEATHER_TOOL, "location"),
        )
        for stream, is_stream in BOTH.items()
    ],
    *[
        Pair(
            f"tool_call: no call, tools {name}, {stream}",
            chat(CODING, tools=tools, tool_choice=choice, stream=is_stream),
            no_calls(is_stream),
        )
        for name, tools, choice in (
            ("null", None, None),
            ("empty", [], None),
            ("and choice none", [PYTHON_TOOL], "none"),
        )
        for stream, is_stream in BOTH.items()
    ],
    *[
        Pair(
            f"tool_call: result of a call, {stream}",
            chat(CALCULATED, tools=[tool("calculate", "expression", {"type": "string"})], stream=is_stream),
            {"text": str},
        )
        for stream, is_stream in BOTH.items()
    ],
]
MESSAGES = [
    Pair(
        "anthropic: message",
        message(),
        {
            "type": "message",
            "role": "assistant",
            "content.0.type": "text",
            "content.0.text": str,
            "stop_reason": lambda reason: reason in ("end_turn", "max_tokens"),
            "usage.input_tokens": int,
            "usage.output_tokens": lambda number: number > 0,
            "usage.cache_read_input_tokens": int,
            "timings": ABSENT,
        },
    ),
    Pair("anthropic: system", message(system="You are a helpful assistant."), {"type": "message", "content.#": 1}),
    Pair(
        "anthropic: parts",
        message([{"type": "text", "text": "What is"}, {"type": "text", "text": " the answer?"}]),
        {"type": "message"},
    ),
    Pair(
        "anthropic: conversation",
        message(
            [
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": "Hi there!"},
                {"role": "user", "content": "How are you?"},
            ]
        ),
        {"type": "message"},
    ),
    Pair(
        "anthropic: stream",
        message(stream=True),
        {
            "types": lambda types: (
                [one for one in types if one not in ("ping", "content_block_delta")]
                == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
            ),
            "events.0.message.content": lambda content: content == [],
            "events.0.message.role": "assistant",
            "events.0.message.usage.input_tokens": lambda number: number > 0,
            "events.1.index": 0,
            "events.1.content_block.type": "text",
            "events.-2.delta.stop_reason": lambda reason: reason in ("end_turn", "max_tokens"),
            "events.-2.usage.output_tokens": lambda number: number > 0,
            "last.timings": ABSENT,
        },
    ),
    Pair(
        "anthropic: deltas of a stream",
        message(stream=True),
        {
            "events": lambda events: all(
                event["delta"]["type"] == "text_delta" and event["index"] == 0
                for event in events
                if event["type"] == "content_block_delta"
            )
        },
    ),
    Pair(
        "anthropic: count tokens",
        Ask("/v1/messages/count_tokens", {"model": "tiny", "messages": [{"role": "user", "content": "Hello world"}]}),
        {"input_tokens": lambda number: number > 0, "output_tokens": ABSENT},
    ),
    Pair(
        "anthropic: count tokens with system",
        Ask(
            "/v1/messages/count_tokens",
            {"model": "tiny", "system": "Be kind.", "messages": [{"role": "user", "content": "Hello"}]},
        ),
        {"input_tokens": lambda number: number > 0},
    ),
    Pair(
        "anthropic: tool",
        message(
            "What's the weather in Paris?",
            max_tokens=120,
            tools=[anthropic_tool("get_weather", "location")],
            tool_choice={"type": "any"},
        ),
        {
            "stop_reason": "tool_use",
            "content.-1.type": "tool_use",
            "content.-1.name": "get_weather",
            "content.-1.id": str,
            "content.-1.input": dict,
        },
    ),
    Pair(
        "anthropic: tool result",
        message(
            [
                *WEATHER_RESULT,
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "Sunny, 25°C"}]},
            ]
        ),
        {"type": "message", "content.0.type": "text"},
    ),
    Pair(
        "anthropic: tool result and text",
        message(
            [
                *WEATHER_RESULT,
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Here:"},
                        {"type": "tool_result", "tool_use_id": "t1", "content": "Sunny"},
                    ],
                },
            ]
        ),
        {"type": "message", "content.#": lambda number: number > 0},
    ),
    Pair(
        "anthropic: tool result with an error",
        message(
            [
                *WEATHER_RESULT,
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": "City not found"}
                    ],
                },
            ]
        ),
        {"type": "message"},
    ),
    Pair(
        "anthropic: tool in a stream",
        message(
            "Calculate 2+2",
            max_tokens=120,
            stream=True,
            tools=[anthropic_tool("calculator", "expression")],
            tool_choice={"type": "any"},
        ),
        {
            "types": lambda types: types[0] == "message_start" and types[-1] == "message_stop",
            "events": lambda events: (
                [event["content_block"].get("name") for event in events if event["type"] == "content_block_start"][-1]
                == "calculator"
            ),
        },
    ),
    Pair(
        "anthropic: indexes of blocks in a stream",
        message("Use the test tool", max_tokens=120, stream=True, tools=[anthropic_tool("test_tool", "param")]),
        {
            "events": lambda events: (
                [event["index"] for event in events if event["type"] == "content_block_start"]
                == sorted({event["index"] for event in events if event["type"] == "content_block_stop"})
            )
        },
    ),
    Pair(
        "anthropic: image",
        message(
            [
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
                {"type": "text", "text": "What is this?"},
            ]
        ),
        {"type": "error", "error.type": "invalid_request_error"},
        400,
        differs="images",
    ),
    Pair(
        "anthropic: stop_sequences",
        message("Count to 10", stop_sequences=["\n", "END"]),
        {"type": "message", "stop_sequence": lambda text: text in (None, "\n", "END")},
    ),
    Pair("anthropic: temperature", message("Hello", temperature=0.5), {"type": "message"}),
    Pair("anthropic: top_p", message("Hello", top_p=0.9), {"type": "message"}),
    Pair("anthropic: top_k", message("Hello", top_k=40), {"type": "message"}),
    Pair(
        "anthropic: missing messages",
        Ask("/v1/messages", {"model": "tiny", "max_tokens": 50}),
        {"type": "error", "error.type": "invalid_request_error"},
        400,
    ),
    Pair(
        "anthropic: empty messages",
        Ask("/v1/messages", {"model": "tiny", "max_tokens": 50, "messages": []}),
        {"type": "error", "error.type": "invalid_request_error"},
        400,
        differs="no_messages",
    ),
    Pair(
        "anthropic: thinking",
        message(
            "What is 2+2?", max_tokens=1100, thinking={"type": "enabled", "budget_tokens": 1024}, temperature=1, top_k=1
        ),
        {"type": "message", "content.0.type": "thinking", "content.0.thinking": str, "content.0.signature": str},
    ),
    Pair(
        "anthropic: thinking in a stream",
        message(
            "What is 2+2?",
            max_tokens=1100,
            thinking={"type": "enabled", "budget_tokens": 1024},
            temperature=1,
            top_k=1,
            stream=True,
        ),
        {
            "events.1.content_block.type": "thinking",
            "events.*.delta.type": lambda found: "thinking_delta" in found and "signature_delta" in found,
        },
    ),
    Pair("anthropic: metadata", message("Hello", metadata={"user_id": "u1"}), {"type": "message"}),
    Pair(
        "anthropic: format differs from OpenAI's",
        message("Hello"),
        lambda other: {"object": ABSENT, "choices": ABSENT, "usage.prompt_tokens": ABSENT, "usage.input_tokens": int},
        before=[chat()],
    ),
]
RESPONSES = [
    Pair("responses: path without /v1", Ask("/responses", respond().body), {"object": "response"}),
    Pair(
        "responses: json_schema",
        respond(
            text={"format": {"type": "json_schema", "name": "test", "schema": {"const": "foooooo"}}},
            max_output_tokens=20,
        ),
        {"text": '"foooooo"'},
    ),
    Pair("responses: json_object", respond(text={"format": {"type": "json_object"}}), {"text": re.compile(r"^\{")}),
    Pair("responses: text", respond(text={"format": {"type": "text"}}), {"text": str}),
    Pair(
        "responses: json_schema without a schema",
        respond(text={"format": {"type": "json_schema", "name": "test"}}),
        {"error.message": str},
        400,
    ),
    Pair(
        "responses: ids",
        respond(input=BOOK, max_output_tokens=8),
        {"id": re.compile("^resp_"), "output.0.id": re.compile("^msg_")},
    ),
    Pair(
        "responses: ids in a stream",
        respond(input=BOOK, max_output_tokens=8, stream=True),
        {
            "events": lambda events: len({event["item_id"] for event in events if "item_id" in event}) == 1,
            "events.0.type": "response.created",
            "events.0.response.id": re.compile("^resp_"),
            "final.output.0.id": re.compile("^msg_"),
        },
    ),
    Pair(
        "responses: text of a stream",
        respond(stream=True),
        {
            "events": lambda events: (
                "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
                == events[-1]["response"]["output"][0]["content"][0]["text"]
            )
        },
    ),
    Pair(
        "responses: timings and progress",
        respond(stream=True, timings_per_token=True, return_progress=True),
        {"events": lambda events: not any({"timings", "prompt_progress"} & set(event) for event in events)},
        differs="progress",
    ),
]
QUESTION = "What is the capital of France ?"
UNICODE = "This is a test string with unicode 媽 and emoji 🤗"
TOKENS = [
    Pair(
        "tokenize: there and back",
        lambda ids: native("/detokenize", tokens=ids.body["tokens"]),
        lambda _: {"content": lambda text: text.strip() == QUESTION},
        before=[native("/tokenize", content=QUESTION)],
    ),
    Pair(
        "tokenize: add_special",
        native("/tokenize", content=QUESTION, add_special=True),
        lambda plain: {"tokens": lambda tokens: tokens[-len(plain.body["tokens"]) :] == plain.body["tokens"]},
        before=[native("/tokenize", content=QUESTION, add_special=False)],
    ),
    Pair(
        "tokenize: with_pieces",
        native("/tokenize", content=UNICODE, with_pieces=True),
        {"tokens.*.id": int, "tokens.*.piece": lambda pieces: all(len(piece) > 0 for piece in pieces)},
    ),
]
INPUTS: list[tuple[str, Any, int]] = [
    ("a text", "string", 1),
    ("token ids", [12, 34, 56], 1),
    ("two texts", ["string1", "string2"], 2),
    ("a text and token ids", ["string1", [12, 34, 56]], 2),
    ("two lists of token ids", [[12, 34, 56], [12, 34, 56]], 2),
]
VECTORS = [
    Pair(
        "embedding: native path, list",
        Ask("/embeddings", embed("hello").body),
        {"object": "list", "data.#": 1},
        differs="native",
    ),
    Pair("embedding: native path", Ask("/embedding", {"model": "tiny", "content": "hello"}), {}, 404, differs="native"),
    Pair("embedding: one text", embed(LIFE), are_vectors(1) | {"data.0.embedding": is_unit}),
    Pair(
        "embedding: four texts",
        embed([LIFE, "Write a joke about AI", "This is a test", "This is another test"]),
        are_vectors(4),
    ),
    Pair("embedding: long texts", embed(["a " * 253, "b " * 254, "c " * 255, "d " * 256]), are_vectors(4)),
    *[Pair(f"embedding: {name}", embed(given), are_vectors(number)) for name, given, number in INPUTS],
    Pair("embedding: empty text", embed(""), rejected("input"), 400, differs="empty_input"),
    Pair(
        "embedding: texts and token ids in one input",
        embed([12, 34, "string", 56, 78]),
        rejected("input"),
        400,
        differs="mixed_prompt",
    ),
    *[
        Pair(f"embedding: {name}", embed(given), rejected("input"), 400, differs="object_input")
        for name, given in (
            ("prompt_string", {"prompt_string": "string"}),
            ("content parts", {"content": [{"type": "text", "text": "string"}]}),
        )
    ],
    *[
        Pair(f"embedding: invalid input, {name}", embed(given), {"error.message": str}, 400)
        for name, given in (
            ("empty list", []),
            ("object", {"content": "string"}),
            ("audio", {"content": [{"type": "input_audio", "input_audio": {}}]}),
        )
    ],
    Pair(
        "embedding: text that is too long",
        embed("This is a test " * 1500),
        {"error.code": "context_length_exceeded"},
        400,
    ),
    Pair(
        "embedding: same texts",
        embed([LIFE] * 5),
        {"data.*.embedding": lambda found: all(near(found[0])(other) for other in found[1:])},
    ),
    Pair(
        "embedding: usage",
        embed(LIFE),
        {"body": lambda body: body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > 0},
    ),
    Pair(
        "embedding: usage of two texts",
        embed([LIFE, LIFE]),
        lambda one: {"usage.prompt_tokens": 2 * one.body["usage"]["prompt_tokens"]},
        before=[embed(LIFE)],
    ),
    Pair(
        "embedding: base64",
        embed("Test base64", encoding_format="base64"),
        lambda plain: {"data.0.embedding": lambda text: near(plain.body["data"][0]["embedding"])(unpacked(text))},
        before=[embed("Test base64")],
    ),
    Pair(
        "embedding: of a reranker",
        Ask("/v1/embeddings", {"model": "ranks", "input": "hello"}),
        {"message": re.compile("rerank")},
        400,
    ),
]
DOCUMENTS = ["w3 w4 w5", "w6", "w7 w8", "w9"]
RANKS = [
    *[
        Pair(
            f"rerank: {path}",
            rank(path, documents=DOCUMENTS),
            {
                "results.#": 4,
                "results.*.index": lambda found: sorted(found) == [0, 1, 2, 3],
                "results.*.relevance_score": lambda found: in_order(found[::-1]),
            },
        )
        for path in ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking")
    ],
    Pair("rerank: format of TEI", rank(texts=DOCUMENTS), rejected("texts"), 400, differs="tei"),
    *[
        Pair(f"rerank: invalid documents, {name}", rank(documents=given), {"error.message": str}, 400)
        for name, given in (("empty list", []), ("null", None), ("number", 123), ("numbers", [1, 2, 3]))
    ],
    Pair(
        "rerank: usage",
        rank(documents=DOCUMENTS[:2]),
        {"body": lambda body: body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > 0},
    ),
    *[
        Pair(f"rerank: top_n {top_n}", rank(documents=DOCUMENTS, top_n=top_n), {"results.#": number})
        for top_n, number in ((None, 4), (2, 2), (4, 4), (99, 4))
    ],
]
CODE = {"input_prefix": "int main() {\n", "prompt": "    int n_threads = llama_", "input_suffix": "}\n"}
NO_INFILL = rejected("no fill-in-the-middle tokens")  # the bundled model; tests/integration/gateway/test_infill.py
INFILLS = [
    Pair("infill: without extra files", native("/infill", **CODE, n_predict=8), NO_INFILL, 400),
    Pair(
        "infill: with an extra file",
        native("/infill", **CODE, n_predict=8, input_extra=[{"filename": "llama.h", "text": "int n_threads();\n"}]),
        NO_INFILL,
        400,
    ),
    *[
        Pair(
            f"infill: invalid extra file {number}",
            native("/infill", **CODE, input_extra=[given]),
            {"error.message": str},
            400,
        )
        for number, given in enumerate(
            (
                {},
                {"filename": "ok"},
                {"filename": 123},
                {"filename": 123, "text": "abc"},
                {"filename": 123, "text": 456},
            )
        )
    ],
]
TABLE = Table(
    "llama.cpp's server tests",
    [*BASICS, *COMPLETIONS, *CHATS, *TOOLS, *MESSAGES, *RESPONSES, *TOKENS, *VECTORS, *RANKS, *INFILLS],
    DIFFERENCES,
)
