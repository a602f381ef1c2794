"""Pairs from the tests of vLLM's server (tests/entrypoints: openai, serve, pooling and anthropic).

Expectations about the texts of vLLM's test models are left out. Tests of vLLM's internals and of its command line have
no counterpart here.
"""

from __future__ import annotations

import json
import re
from typing import Any

from . import ABSENT, Ask, Difference, Expected, Pair, Table
from .asks import (
    BOTH,
    PIXEL,
    TINY,
    anthropic_tool,
    are_vectors,
    called,
    chat,
    complete,
    embed,
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

SUM = [{"role": "system", "content": "you are a helpful assistant"}, {"role": "user", "content": "what is 1+1?"}]
IDS = [40, 41, 42, 43, 44]
CAR = {
    "type": "object",
    "properties": {"brand": {"type": "string", "maxLength": 5}, "kind": {"enum": ["sedan", "SUV"]}},
    "required": ["brand", "kind"],
    "additionalProperties": False,
}
BAD_SCHEMA = {**CAR, "properties": {**CAR["properties"], "foo": "bar"}}  # type: ignore[dict-item]
BAD_GRAMMAR = 'root ::= undefined_rule\n\ncolumn ::= "col_1 " | "col_2 "\n'
ADDRESS = r"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
LANGUAGES = ["Python", "Java", "Ruby", "PHP"]

DIFFERENCES = {
    "prompt_logprobs": Difference(
        "`prompt_logprobs` reports the log probabilities of the prompt",
        "400 that names the parameter. Logits of a cached prefix are not kept",
        "`logprobs` of the generated tokens",
    ),
    "unlimited_thinking": Difference(
        "`thinking_token_budget: -1` doesn't limit the reasoning",
        "400, because a budget is a number of tokens",
        "leave the parameter out",
    ),
    "special_tokens": Difference(
        "`/tokenize` adds special tokens to a chat with `add_special_tokens`",
        "400, because the chat template already adds them",
        "leave the parameter out",
    ),
    "echo": Difference(
        "`echo` repeats the prompt, or the last message, before the answer",
        "400 that names the parameter, because the client already has the prompt",
        "join both texts in your program",
    ),
    "beam_search": Difference(
        "`use_beam_search` searches several beams",
        "400 that names the parameter. Sequences of a batch are sampled independently",
        "`n` with a `temperature` above 0",
    ),
    "truncation": Difference(
        "`truncate_prompt_tokens` and `truncation_side` shorten the prompt",
        "400 that names the parameter. A truncated prompt gives wrong answers that look right",
        "`/tokenize`, and token ids as the prompt. Embeddings accept `truncate`",
    ),
    "many_logprobs": Difference(
        "more than 20 `logprobs` of a completion are rejected",
        "up to 100 are reported",
        "a number up to 20, as in chats",
    ),
    "all_logprobs": Difference(
        "`top_logprobs: -1` reports the whole vocabulary, if the server allows it",
        "400, because results are stored in Redis",
        "a number from 0 to 20",
    ),
    "token_ids": Difference(
        "`return_token_ids` adds the token ids of the prompt and the answer",
        "400 that names the parameter, because OpenAI's format has no field for them",
        "`/tokenize`, or jobs with `return_tokens`",
    ),
    "fields_of_messages": Difference(
        "unknown fields of messages are ignored",
        "400 that names the field. Fields that clients add to replies, such as `parsed`, are ignored",
        "messages with known fields only",
    ),
    "empty_ids": Difference(
        "`tool_use` and `tool_result` with an empty id are rejected",
        "they are accepted, because most chat templates don't use ids",
        "ids as the API returned them",
    ),
    "redacted": Difference(
        "`redacted_thinking` is accepted and ignored",
        "400, because only Anthropic's models can read it",
        "leave these blocks out",
    ),
    "probes": Difference(
        "`GET /version`, `/load` and `/tokenizer_info` describe one process",
        "404, because a gateway serves many workers and needs no model files",
        "`cellama --version`, `GET /metrics`, `GET /v1/models`",
    ),
    "invocations": Difference(
        "`POST /invocations` accepts the requests of all endpoints",
        "404",
        "the path of the endpoint",
    ),
    "chat_batch": Difference(
        "`POST /v1/chat/completions/batch` answers several conversations in one reply",
        "404",
        "concurrent requests, which run as one batch, or `/v1/batches`",
    ),
    "pooling": Difference(
        "`POST /pooling`, `/score` and `/classify` return raw outputs and scores",
        "404",
        "`/v1/embeddings`, and `/v1/rerank`, whose scores are those of `/score`",
    ),
    "chat_embeddings": Difference(
        "`/v1/embeddings` accepts `messages`",
        "400 that names the parameter, because embedding models have no chat template",
        "`input`",
    ),
    "vector_formats": Difference(
        "vectors can be `bytes` and have other types or byte orders (`embed_dtype`, `endianness`)",
        "400 that names the parameter",
        "`encoding_format: base64`, which is little-endian float32",
    ),
    "activation": Difference(
        "`use_activation` and `max_tokens_per_doc` change vectors and scores",
        "400 that names the parameter. Vectors have length 1, and scores are raw",
        "`1 / (1 + exp(-score))`, and `truncate` for long documents",
    ),
    "roles": Difference(
        "messages may have any role, such as `my-custom-role`",
        "400, because chat templates ignore roles that they don't know",
        "`system`, `developer`, `user`, `assistant`, `tool`",
    ),
    "raw_messages": Difference(
        "`enable_response_messages` adds the tokens of the prompt and the answer to a response",
        "400 that names the parameter",
        "`/tokenize` with `messages`",
    ),
    "token_strings": Difference(
        "`return_tokens_as_token_ids` writes tokens of `logprobs` as `token_id:17`",
        "400 that names the parameter",
        "the field `bytes` of `logprobs`",
    ),
    "running_usage": Difference(
        "`continuous_usage_stats` adds `usage` to each chunk",
        "the member is ignored, as other unknown members of `stream_options`",
        "`include_usage`, which adds a last chunk with the usage",
    ),
    "hidden_reasoning": Difference(
        "`include_reasoning: false` removes the reasoning from the reply",
        "400 that names the parameter",
        "`reasoning_effort: none`, or ignore `reasoning_content`",
    ),
    "images": Difference(
        "multimodal models accept images, audio and video",
        "400, because models only accept text",
        "another server for images",
    ),
    "adapters": Difference(
        "the name of a LoRA adapter is the name of a model",
        "404 `model_not_found`, because a request may combine adapters",
        '`adapters: ["NAME"]` with the model\'s id',
    ),
    "model": Difference(
        "a request without `model` is answered by the loaded model",
        "400, because a gateway serves several models",
        "the id, or `:default`",
    ),
}


def choice(**expected: Any) -> Expected:
    return {f"choices.0.{name.replace('__', '.')}": value for name, value in expected.items()}


def structured(**given: Any) -> Ask:
    return chat(SUM, max_tokens=60, structured_outputs=given)


def is_car(text: str) -> bool:
    car = json.loads(text)
    return set(car) == {"brand", "kind"} and car["kind"] in ("sedan", "SUV")


def usages(events: list[Any]) -> list[Any]:
    return [event.get("usage") for event in events]


def texts_of(events: list[Any]) -> list[str]:
    """The text of each choice of a stream."""
    texts: dict[int, str] = {}
    for event in events:
        for one in event["choices"]:
            delta = one.get("text") or one.get("delta", {}).get("content") or ""
            texts[one["index"]] = texts.get(one["index"], "") + delta
    return [texts[index] for index in sorted(texts)]


def finishes(events: list[Any]) -> list[str]:
    return [one["finish_reason"] for event in events for one in event["choices"] if one["finish_reason"]]


ROBOT = ["A robot may not injure another robot", "My name is"]
COMPLETIONS = [
    Pair(
        "completion: single",
        complete("Hello, my name is", max_tokens=5),
        choice(finish_reason="length", text=str)
        | {
            "id": str,
            "choices.#": 1,
            "usage.completion_tokens": 5,
            "usage.prompt_tokens_details.cached_tokens": int,
            "body": lambda body: body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 5,
        },
    ),
    Pair(
        "completion: token ids",
        complete(IDS, max_tokens=5),
        {"text": str, "usage.prompt_tokens": 5, "choices.0.prompt_logprobs": lambda found: found in (ABSENT, None)},
    ),
    *[
        Pair(
            f"completion: truncation_side {side}",
            complete(IDS, max_tokens=1, truncate_prompt_tokens=4, truncation_side=side),
            rejected("trunc"),
            400,
            differs="truncation",
        )
        for side in ("left", "right")
    ],
    Pair("completion: no logprobs", complete(IDS, max_tokens=5, logprobs=None), {"choices.0.logprobs": None}),
    Pair(
        "completion: zero logprobs",
        complete(IDS, max_tokens=5, logprobs=0),
        {"choices.0.logprobs.token_logprobs": list, "choices.0.logprobs.top_logprobs.0": lambda found: len(found) <= 1},
    ),
    Pair(
        "completion: some logprobs",
        complete(IDS, max_tokens=5, logprobs=5),
        {
            "choices.0.logprobs.token_logprobs": list,
            "choices.0.logprobs.top_logprobs.0": lambda found: 5 <= len(found) <= 6,
        },
    ),
    Pair(
        "completion: 21 logprobs",
        complete(IDS, max_tokens=5, logprobs=21),
        {"choices.0.logprobs.tokens": list},
        differs="many_logprobs",
    ),
    Pair(
        "completion: 30 logprobs in a stream",
        complete(IDS, max_tokens=5, logprobs=30, stream=True),
        {"events.0.choices.0.logprobs.tokens": list},
        differs="many_logprobs",
    ),
    *[
        Pair(
            f"completion: prompt_logprobs {number}",
            complete(ROBOT, prompt_logprobs=number),
            rejected("prompt_logprobs"),
            400,
            differs=differs,
        )
        for number, differs in ((-1, ""), (0, "prompt_logprobs"), (1, "prompt_logprobs"))
    ],
    Pair(
        "completion: without prompt_logprobs",
        complete(ROBOT),
        {"choices.*.prompt_logprobs": lambda found: set(found) <= {None, ABSENT}},
    ),
    Pair(
        "completion: stream equals the reply",
        complete("What is an LLM?", max_tokens=5, stream=True),
        lambda whole: {"text": whole.text, "events": lambda events: finishes(events) == ["length"]},
        before=[complete("What is an LLM?", max_tokens=5)],
    ),
    Pair(
        "completion: three choices",
        complete("What is an LLM?", n=3, max_tokens=30, temperature=1, seed=42),
        {
            "choices.*.index": lambda found: found == [0, 1, 2],
            "choices.*.finish_reason": str,
            "choices.*.text": lambda found: len(set(found)) == 3,
        },
    ),
    Pair(
        "completion: three choices in a stream",
        complete("What is an LLM?", n=3, max_tokens=30, temperature=1, seed=42, stream=True),
        {"events": lambda events: len(finishes(events)) == 3 and len(set(texts_of(events))) == 3},
    ),
    *[
        Pair(
            f"completion: stream_options {options}",
            complete("France?", max_tokens=5, stream=True, stream_options=options),
            {"events": lambda events: set(map(str, usages(events))) == {"None"}},
        )
        for options in (
            {"include_usage": False, "continuous_usage_stats": False},
            {"include_usage": False, "continuous_usage_stats": True},
            {},
        )
    ],
    Pair(
        "completion: include_usage",
        complete(
            "France?",
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": False},
        ),
        {
            "last.choices.#": 0,
            "last.usage.completion_tokens": 5,
            "events": lambda events: set(map(str, usages(events[:-1]))) == {"None"},
        },
    ),
    Pair(
        "completion: continuous_usage_stats",
        complete(
            "France?", max_tokens=5, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
        ),
        {"last.usage.completion_tokens": 5, "events.0.usage": lambda found: found in (None, ABSENT)},
        differs="running_usage",
    ),
    *[
        Pair(
            f"completion: stream_options {options} without stream",
            complete("France?", stream=False, stream_options=options),
            rejected("stream"),
            400,
        )
        for options in (
            {"include_usage": None},
            {"include_usage": True},
            {"continuous_usage_stats": None},
            {"continuous_usage_stats": True},
        )
    ],
    *[
        Pair(
            f"completion: two prompts, {name}",
            complete([prompt] * 2, max_tokens=5),
            {"choices.#": 2, "choices.*.text": lambda found: found[0] == found[1]},
        )
        for name, prompt in (("texts", "Hello, my name is"), ("token ids", IDS))
    ],
    *[
        Pair(
            f"completion: two prompts in a stream, {name}",
            complete([prompt] * 2, max_tokens=5, stream=True),
            {
                "events.*.choices.#": lambda found: set(found) == {1},
                "events": lambda events: len(set(texts_of(events))) == 1,
            },
        )
        for name, prompt in (("texts", "Hello, my name is"), ("token ids", IDS))
    ],
    *[
        Pair(
            f"completion: beam search, {name}",
            complete([prompt] * 2, n=2, use_beam_search=True),
            rejected("use_beam_search"),
            400,
            differs="beam_search",
        )
        for name, prompt in (("texts", "Hello, my name is"), ("token ids", IDS))
    ],
    *[
        Pair(
            f"completion: echo with logprobs {number}",
            complete(echo=True, logprobs=number),
            rejected("echo"),
            400,
            differs="echo",
        )
        for number in (1, 0)
    ],
    *[
        Pair(
            f"completion: structured_outputs, invalid {name}",
            complete(structured_outputs=given, max_tokens=40),
            {"error.message": str},
            400,
        )
        for name, given in (
            ("schema", {"json": BAD_SCHEMA}),
            ("regex", {"regex": "[.*"}),
            ("grammar", {"grammar": BAD_GRAMMAR}),
        )
    ],
    Pair(
        "completion: structured_outputs, schema",
        complete(structured_outputs={"json": CAR}, max_tokens=40, ignore_eos=False),
        {"text": is_car},
    ),
    Pair("completion: empty prompt", complete(None, prompt_embeds=[]), {"error.message": str}, 400),
    Pair("completion: empty list of prompts", complete([]), rejected("prompt"), 400),
    Pair("completion: list with one prompt", complete(["hello"]), {"choices.#": 1}),
    Pair("completion: token id outside of the vocabulary", complete([999999]), rejected("prompt", "outside"), 400),
    Pair(
        "completion: text offsets",
        complete("Hi", logprobs=0, stop=["\n\n"]),
        {
            "choices.0.logprobs": lambda found: (
                found["text_offset"] == [sum(map(len, found["tokens"][:i])) for i in range(len(found["tokens"]))]
            )
        },
    ),
    Pair(
        "completion: text offsets of a stream",
        complete("Hi", logprobs=0, stop=["\n\n"], stream=True),
        lambda whole: {
            "events": lambda events: (
                [
                    offset
                    for event in events
                    for one in event["choices"]
                    if one["logprobs"]
                    for offset in one["logprobs"]["text_offset"]
                ]
                == whole.body["choices"][0]["logprobs"]["text_offset"]
            )
        },
        before=[complete("Hi", logprobs=0, stop=["\n\n"])],
    ),
    Pair(
        "completion: return_token_ids",
        complete("I love coding 🚀", return_token_ids=True),
        rejected("return_token_ids"),
        400,
        differs="token_ids",
    ),
    Pair(
        "completion: without return_token_ids",
        complete("I love coding 🚀", return_token_ids=False),
        {"choices.0.token_ids": lambda found: found in (ABSENT, None)},
    ),
    Pair(
        "completion: return_token_ids of token ids",
        complete(IDS, return_token_ids=True),
        rejected("return_token_ids"),
        400,
        differs="token_ids",
    ),
    Pair(
        "completion: return_tokens_as_token_ids",
        complete(IDS, logprobs=1, return_tokens_as_token_ids=True),
        rejected("return_tokens_as_token_ids"),
        400,
        differs="token_strings",
    ),
]
CONVERSATION = [*SUM, {"role": "assistant", "content": "2"}, {"role": "user", "content": "Why?"}]
SAYING = "Here is a common saying about apple. An apple a day, keeps"
CHATS = [
    Pair("chat: no logprobs", chat(SUM, logprobs=False), {"choices.0.logprobs": None}),
    Pair(
        "chat: zero logprobs",
        chat(SUM, logprobs=True, top_logprobs=0),
        {"choices.0.logprobs.content.0.top_logprobs.#": 0},
    ),
    Pair(
        "chat: some logprobs",
        chat(SUM, logprobs=True, top_logprobs=5),
        {"choices.0.logprobs.content.0.top_logprobs.#": 5},
    ),
    Pair("chat: 30 logprobs", chat(SUM, logprobs=True, top_logprobs=30), rejected("top_logprobs"), 400),
    Pair(
        "chat: 21 logprobs in a stream",
        chat(SUM, logprobs=True, top_logprobs=21, stream=True),
        rejected("top_logprobs"),
        400,
    ),
    Pair(
        "chat: -1 logprobs",
        chat(SUM, max_tokens=1, logprobs=True, top_logprobs=-1),
        rejected("logprobs"),
        400,
        differs="all_logprobs",
    ),
    *[
        Pair(
            f"chat: prompt_logprobs {number}",
            chat(CONVERSATION, prompt_logprobs=number),
            rejected("prompt_logprobs"),
            400,
            differs=differs,
        )
        for number, differs in ((-1, ""), (0, "prompt_logprobs"), (1, "prompt_logprobs"), (2, "prompt_logprobs"))
    ],
    Pair(
        "chat: without prompt_logprobs", chat(CONVERSATION), {"prompt_logprobs": lambda found: found in (ABSENT, None)}
    ),
    Pair(
        "chat: single",
        chat(SUM, max_tokens=None, max_completion_tokens=5, logprobs=True, top_logprobs=5),
        choice(finish_reason="length", message__role="assistant", message__content=str)
        | {
            "usage.completion_tokens": 5,
            "body": lambda body: body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 5,
        },
    ),
    Pair(
        "chat: second turn",
        lambda first: chat(
            [*SUM, first.body["choices"][0]["message"], {"role": "user", "content": "express it in json"}]
        ),
        lambda _: {"text": str},
        before=[chat(SUM)],
    ),
    Pair(
        "chat: stream equals the reply",
        chat(SUM, stream=True),
        lambda whole: {"text": whole.text, "events": lambda events: len(finishes(events)) == 1},
        before=[chat(SUM)],
    ),
    Pair(
        "chat: include_usage false",
        chat(SUM, stream=True, stream_options={"include_usage": False}),
        {"events": lambda events: set(map(str, usages(events))) == {"None"}},
    ),
    Pair(
        "chat: include_usage",
        chat(SUM, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": False}),
        {
            "last.choices.#": 0,
            "last.usage.completion_tokens": int,
            "events": lambda events: set(map(str, usages(events[:-1]))) == {"None"},
        },
    ),
    *[
        Pair(
            f"chat: stream_options {options} without stream",
            chat(SUM, stream=False, stream_options=options),
            rejected("stream"),
            400,
        )
        for options in ({"include_usage": None}, {"include_usage": True})
    ],
    Pair(
        "chat: continuous_usage_stats",
        chat(SUM, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}),
        {"last.usage.completion_tokens": int},
        differs="running_usage",
    ),
    Pair("chat: min_tokens", chat(SUM, max_tokens=40, min_tokens=40), {"usage.completion_tokens": 40}),
    Pair("chat: structured_outputs, choice", structured(choice=LANGUAGES), {"text": lambda text: text in LANGUAGES}),
    Pair(
        "chat: structured_outputs, choice with logprobs",
        chat(SUM, structured_outputs={"choice": LANGUAGES}, logprobs=True, top_logprobs=5),
        {"choices.0.logprobs.content.0.top_logprobs.*.logprob": lambda found: all(value >= -9999 for value in found)},
    ),
    Pair("chat: structured_outputs, schema", structured(json=CAR), {"text": is_car}),
    Pair("chat: structured_outputs, regex", structured(regex=ADDRESS), {"text": re.compile(f"^{ADDRESS}$")}),
    Pair(
        "chat: structured_outputs, grammar",
        structured(grammar='root ::= "SELECT " ("a" | "b")'),
        {"text": re.compile("^SELECT [ab]$")},
    ),
    Pair("chat: structured_outputs, wrong type", structured(regex={"1": "Python"}), {"error.message": str}, 400),
    *[
        Pair(
            f"chat: structured_outputs, invalid {name}",
            chat(SUM, structured_outputs=given),
            {"error.message": str},
            400,
        )
        for name, given in (
            ("schema", {"json": BAD_SCHEMA}),
            ("regex", {"regex": "[.*"}),
            ("grammar", {"grammar": BAD_GRAMMAR}),
            ("empty grammar", {"grammar": ""}),
        )
    ],
    *[
        Pair(f"chat: {name}", chat(SUM, max_tokens=40, **{name: given}), expected)
        for name, given, expected in (
            ("guided_json", CAR, {"text": is_car}),
            ("guided_regex", ADDRESS, {"text": re.compile(f"^{ADDRESS}$")}),
            ("guided_choice", LANGUAGES, {"text": lambda text: text in LANGUAGES}),
            ("guided_grammar", 'root ::= "yes" | "no"', {"text": re.compile("^(yes|no)$")}),
        )
    ],
    Pair("chat: json_object", chat(SUM, response_format={"type": "json_object"}), {"text": re.compile(r"^\{")}),
    Pair(
        "chat: json_schema",
        chat(
            SUM, max_tokens=40, response_format={"type": "json_schema", "json_schema": {"name": "car", "schema": CAR}}
        ),
        {"text": is_car},
    ),
    Pair("chat: text", chat(SUM, response_format={"type": "text"}), {"text": str}),
    Pair(
        "chat: unknown field of a message",
        chat([{"role": "user", "content": "what is 1+1?", "extra_field": "0"}]),
        rejected("extra_field"),
        400,
        differs="fields_of_messages",
    ),
    Pair(
        "chat: parts of text",
        chat([{"role": "user", "content": [{"type": "text", "text": "what is 1+1?"}]}]),
        lambda plain: {"text": plain.text},
        before=[chat([{"role": "user", "content": "what is 1+1?"}])],
    ),
    Pair(
        "chat: unknown field of a part",
        chat([{"role": "user", "content": [{"type": "text", "text": "what is 1+1?", "source_lang_code": "en"}]}]),
        {"text": str},
    ),
    *[
        Pair(
            f"chat: custom role, {name}",
            chat([{"role": "my-custom-role", "content": content}]),
            rejected("role"),
            400,
            differs="roles",
        )
        for name, content in (("text", "what is 1+1?"), ("parts", [{"type": "text", "text": "what is 1+1?"}]))
    ],
    *[
        Pair(f"chat: seed {name}", chat(SUM, seed=seed), rejected("seed"), 400)
        for name, seed in (("below int64", -(1 << 63) - 1), ("above int64", 1 << 63))
    ],
    Pair("chat: negative seed", chat(SUM, seed=-1), {"text": str}),
    Pair("chat: invocations", Ask("/invocations", chat(SUM).body), {}, 404, differs="invocations"),
    Pair(
        "chat: three choices",
        chat(SUM, n=3, temperature=0.7, seed=1, ignore_eos=True),
        {"choices.*.index": lambda found: found == [0, 1, 2], "choices.*.message.content": lambda found: all(found)},
    ),
    Pair(
        "chat: two choices in a stream",
        chat(SUM, n=2, temperature=0.7, seed=1, ignore_eos=True, stream=True),
        {"events": lambda events: len(texts_of(events)) == 2 and all(texts_of(events))},
    ),
    Pair("chat: two choices with a seed", chat(SUM, n=2, temperature=0.8, seed=42), {"choices.#": 2}),
    Pair("chat: one choice", chat(SUM, n=1), {"choices.#": 1, "choices.0.index": 0}),
    *[
        Pair(
            f"chat: truncation_side {side}",
            chat(SUM, truncate_prompt_tokens=4, truncation_side=side),
            rejected("trunc"),
            400,
            differs="truncation",
        )
        for side in ("left", "right")
    ],
    Pair(
        "chat: continue_final_message",
        chat(
            [SUM[1], {"role": "assistant", "content": SAYING}], continue_final_message=True, add_generation_prompt=False
        ),
        {"text": lambda text: SAYING not in text},
    ),
    Pair(
        "chat: continue_final_message with echo",
        chat(
            [SUM[1], {"role": "assistant", "content": SAYING}],
            continue_final_message=True,
            add_generation_prompt=False,
            echo=True,
        ),
        rejected("echo"),
        400,
        differs="echo",
    ),
    Pair("chat: logit_bias", chat(SUM, logit_bias={"17": 1.0}), {"text": str}),
    Pair("chat: logit_bias of an unknown token", chat(SUM, logit_bias={"999999": 1.0}), rejected("999999"), 400),
    Pair(
        "chat: logit_bias of a text",
        chat(SUM, logit_bias={"not_a_token_id": 50}),
        rejected("logit_bias", "not_a_token_id"),
        400,
    ),
    Pair(
        "chat: logit_bias that is not a number",
        chat(SUM, logit_bias={"1": "not_a_number"}),
        rejected("logit_bias"),
        400,
    ),
    Pair(
        "chat: two invalid keys of logit_bias",
        chat(SUM, logit_bias={"bad1": 50.0, "bad2": 20.0}),
        rejected("logit_bias", "bad1"),
        400,
    ),
    Pair("chat: stop_token_ids", chat(SUM, stop_token_ids=[17]), {"text": str}),
    Pair("chat: stop_token_ids outside of the vocabulary", chat(SUM, stop_token_ids=[999999]), rejected("999999"), 400),
    Pair("chat: negative stop_token_ids", chat(SUM, stop_token_ids=[-1]), rejected("stop_token_ids"), 400),
    *[
        Pair(f"chat: body is {name}", Ask("/v1/chat/completions", body), {"error.type": "invalid_request_error"}, 400)
        for name, body in (
            ("not JSON", "this is not valid json{{{"),
            ("a list", '["not", "an", "object"]'),
            ("a number", "42"),
            ("null", "null"),
        )
    ],
    Pair("chat: empty cache_salt", chat(SUM, cache_salt=""), rejected("cache_salt"), 400),
    Pair("chat: cache_salt", chat(SUM, cache_salt="a"), {"text": str}),
    Pair("chat: missing messages", Ask("/v1/chat/completions", {**TINY}), {"error.param": "messages"}, 400),
    Pair("chat: messages that are a text", chat("not-a-list"), rejected("messages", "not-a-list"), 400),
    Pair(
        "chat: conversations in one request",
        Ask("/v1/chat/completions/batch", {**TINY, "messages": [SUM, SUM]}),
        {},
        404,
        differs="chat_batch",
    ),
    Pair(
        "chat: conversations with a schema",
        Ask("/v1/chat/completions/batch", {**TINY, "messages": [SUM], "response_format": {"type": "json_object"}}),
        {},
        404,
        differs="chat_batch",
    ),
    Pair(
        "chat: form as body",
        Ask("/v1/chat/completions", "a=b", headers={"content-type": "application/x-www-form-urlencoded"}),
        {"error.message": str},
        415,
    ),
    Pair(
        "chat: system_fingerprint",
        chat(SUM),
        {"system_fingerprint": lambda found: found in (ABSENT, None) or isinstance(found, str)},
    ),
    Pair(
        "chat: return_token_ids",
        chat(SUM, return_token_ids=True),
        rejected("return_token_ids"),
        400,
        differs="token_ids",
    ),
    Pair(
        "chat: without return_token_ids",
        chat(SUM, return_token_ids=False),
        {"prompt_token_ids": lambda found: found in (ABSENT, None)},
    ),
    Pair("chat: repetition_penalty", chat(SUM, repetition_penalty=1.2, top_k=-1), {"text": str}),
    *[
        Pair(
            f"chat: thinking_token_budget {budget}",
            chat(SUM, max_tokens=40, thinking_token_budget=budget),
            expected,
            status,
        )
        for budget, expected, status in (
            (5, {"usage.completion_tokens": int}, 200),
            (-2, rejected("thinking"), 400),
            (0.6, rejected("thinking"), 400),
            (10.5, rejected("thinking"), 400),
        )
    ],
    Pair(
        "chat: unlimited thinking_token_budget",
        chat(SUM, thinking_token_budget=-1),
        rejected("thinking_token_budget"),
        400,
        differs="unlimited_thinking",
    ),
    Pair(
        "chat: thinking_token_budget limits the reasoning",
        chat(SUM, max_tokens=60, thinking_token_budget=5),
        {"usage.completion_tokens_details.reasoning_tokens": lambda number: number <= 5},
    ),
    Pair(
        "chat: enable_thinking false",
        chat(SUM, chat_template_kwargs={"enable_thinking": False}),
        {
            "text": lambda text: text.strip() != "",
            "choices.0.message.reasoning_content": lambda found: found in (ABSENT, None, ""),
        },
    ),
    Pair(
        "chat: enable_thinking false in a stream",
        chat(SUM, chat_template_kwargs={"enable_thinking": False}, stream=True),
        {
            "text": lambda text: text.strip() != "",
            "events.*.choices.0.delta.reasoning_content": lambda found: set(found) <= {ABSENT, None},
        },
    ),
    Pair(
        "chat: enable_thinking true",
        chat(SUM, max_tokens=60, chat_template_kwargs={"enable_thinking": True}),
        {
            "choices.0.message.reasoning_content": lambda text: len(text) > 0,
            "usage.completion_tokens_details.reasoning_tokens": lambda number: number > 0,
        },
    ),
    Pair(
        "chat: enable_thinking true in a stream",
        chat(SUM, max_tokens=60, chat_template_kwargs={"enable_thinking": True}, stream=True),
        {
            "events.*.choices.0.delta.reasoning_content": lambda found: any(
                isinstance(text, str) and text for text in found
            )
        },
    ),
    *[
        Pair(f"chat: reasoning_effort {effort}", chat(SUM, reasoning_effort=effort), {"choices.0.finish_reason": str})
        for effort in ("none", "low", "medium", "high")
    ],
    Pair(
        "chat: include_reasoning true",
        chat(SUM, include_reasoning=True, max_tokens=60),
        {"choices.0.finish_reason": str},
    ),
    Pair(
        "chat: include_reasoning false",
        chat(SUM, include_reasoning=False),
        rejected("include_reasoning"),
        400,
        differs="hidden_reasoning",
    ),
    Pair(
        "chat: image",
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
        "chat: model is an adapter",
        chat(SUM, model="zephyr-lora"),
        {"error.code": "model_not_found"},
        404,
        differs="adapters",
    ),
    Pair("audio: transcription", Ask("/v1/audio/transcriptions", {}), {}, 404, differs="images"),
    Pair(
        "chat: without model", Ask("/v1/chat/completions", {"messages": SUM}), rejected("model"), 400, differs="model"
    ),
]
WEATHER = tool("get_current_weather", "city", {"type": "string", "maxLength": 12})
FORECAST = tool("get_forecast", "days", {"type": "integer", "minimum": 1, "maximum": 7})
CLOCK = {
    "type": "function",
    "function": {
        "name": "get_current_time",
        "description": "Now",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
DUMMY = {"type": "function", "function": {"name": "dummy", "parameters": CAR}}
BERLIN = [{"role": "user", "content": "What is the weather in Berlin?"}]
NAMED = {"type": "function", "function": {"name": "get_current_weather"}}
FORCED: list[tuple[str, Any]] = [("required", "required"), ("named", NAMED)]


def call_of(name: str, arguments: str) -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]


FUNCTIONS = [
    *[
        Pair(
            f"functions: {name}, {stream}, thinking {thinks}",
            chat(
                BERLIN,
                max_tokens=120,
                tools=[WEATHER],
                tool_choice=given,
                stream=is_stream,
                chat_template_kwargs={"enable_thinking": thinks},
            ),
            called("get_current_weather", "city", is_stream),
        )
        for name, given in FORCED
        for stream, is_stream in BOTH.items()
        for thinks in (False, True)
    ],
    *[
        Pair(
            f"functions: auto, {stream}",
            chat(BERLIN, max_tokens=60, tools=[WEATHER, FORECAST], tool_choice="auto", stream=is_stream),
            {"events.#" if is_stream else "choices.#": int},
        )
        for stream, is_stream in BOTH.items()
    ],
    *[
        Pair(
            f"functions: call with arguments {arguments!r}",
            chat([*BERLIN, *call_of("get_current_time", arguments)], tools=[CLOCK]),
            {"text": str},
        )
        for arguments in ("{}", "")
    ],
    *[
        Pair(
            f"functions: named tool with a schema, {stream}",
            chat(
                SUM,
                max_tokens=120,
                tools=[DUMMY],
                tool_choice={"type": "function", "function": {"name": "dummy"}},
                stream=is_stream,
            ),
            called("dummy", "brand", is_stream),
        )
        for stream, is_stream in BOTH.items()
    ],
    Pair("functions: named tool without tools", chat(SUM, tool_choice=NAMED), rejected("tool"), 400),
    Pair(
        "functions: unknown named tool",
        chat(SUM, tools=[DUMMY], tool_choice=NAMED),
        rejected("get_current_weather"),
        400,
    ),
    Pair("functions: empty tool_choice", chat(SUM, tools=[DUMMY], tool_choice={}), rejected("tool_choice"), 400),
    Pair("functions: unknown tool_choice", chat(SUM, tools=[DUMMY], tool_choice="bogus"), rejected("tool_choice"), 400),
    Pair(
        "functions: tool_choice auto without tools",
        chat(SUM, tool_choice="auto"),
        {"text": str},
        differs="auto_without_tools",
    ),
    *[
        Pair(
            f"functions: max_tokens 1, {name}",
            chat(BERLIN, max_tokens=1, tools=[WEATHER], tool_choice=given),
            choice(finish_reason="length", message__tool_calls=lambda calls: calls in (ABSENT, None)),
        )
        for name, given in FORCED
    ],
    Pair(
        "functions: tool_choice null",
        chat(BERLIN, tools=[WEATHER], tool_choice=None),
        lambda plain: {
            "choices": lambda choices: (
                [one["finish_reason"] for one in choices] == [plain.body["choices"][0]["finish_reason"]]
            )
        },
        before=[chat(BERLIN, tools=[WEATHER])],
    ),
    Pair(
        "functions: tool_choice null without tools",
        chat(SUM, tool_choice=None),
        lambda plain: {"text": plain.text},
        before=[chat(SUM)],
    ),
    Pair(
        "functions: tool_choice null with a schema",
        chat(SUM, max_tokens=40, tool_choice=None, structured_outputs={"json": CAR}),
        {"text": is_car},
    ),
    Pair("functions: tool_choice none", chat(BERLIN, tools=[WEATHER], tool_choice="none"), no_calls(False)),
    Pair(
        "functions: return_token_ids with tools",
        chat(BERLIN, tools=[WEATHER], return_token_ids=True),
        rejected("return_token_ids"),
        400,
        differs="token_ids",
    ),
]
DIFFERENCES["auto_without_tools"] = Difference(
    "`tool_choice: auto` without `tools` is rejected",
    "it is accepted, because there is nothing to choose",
    "nothing",
)


def has_pairs(events: list[Any]) -> bool:
    """Whether each item and part of a stream is closed before the next one starts, and at the end."""
    ends = {"output_item.done": "output_item.added", "content_part.done": "content_part.added"}
    ends |= {f"{kind}.done": f"{kind}.delta" for kind in ("output_text", "reasoning_text", "function_call_arguments")}
    is_open: list[str] = []
    for kind in (event["type"].removeprefix("response.") for event in events):
        if kind.endswith(".added") or (kind.endswith(".delta") and (not is_open or is_open[-1] != kind)):
            is_open.append(kind)
        elif kind in ends and is_open and is_open[-1] == ends[kind]:
            is_open.pop()
        elif kind in ends and not kind.startswith(("output_text", "reasoning_text", "function_call")):
            return False
    return not is_open


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def assistant(**more: Any) -> dict[str, Any]:
    return {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Acknowledged."}],
        **more,
    }


def reasoning(**more: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "encrypted_content": None, **more}


PLACE = {
    "type": "function",
    "name": "get_weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "maxLength": 12}},
        "required": ["location"],
        "additionalProperties": False,
    },
}
PLACE_CHOICE = {"type": "function", "name": "get_weather"}
THINK = {"max_output_tokens": 60, "chat_template_kwargs": {"enable_thinking": True}}
RESPONSES = [
    Pair(
        "responses: text",
        respond(),
        {"status": lambda status: status in ("completed", "incomplete"), "output.-1.type": "message"},
    ),
    Pair(
        "responses: effort none",
        respond(reasoning={"effort": "none"}, max_output_tokens=None),
        {"status": "completed", "incomplete_details": None, "output.*.type": "message"},
    ),
    Pair(
        "responses: reasoning item",
        respond(**THINK),
        {"output.0.type": "reasoning", "usage.output_tokens_details.reasoning_tokens": lambda number: number > 0},
    ),
    Pair(
        "responses: reasoning tokens of a stream",
        respond(**THINK, stream=True),
        {"final.usage.output_tokens_details.reasoning_tokens": lambda number: number > 0},
    ),
    Pair(
        "responses: instructions",
        respond(instructions="Finish the answer with QED."),
        {"instructions": "Finish the answer with QED.", "output.#": int},
    ),
    Pair(
        "responses: messages",
        respond(
            input=[
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "What is 5 * 3?"},
                {"role": "assistant", "content": "15."},
                {"role": "user", "content": "Twice that?"},
            ]
        ),
        {"output.#": int},
    ),
    Pair(
        "responses: input_text",
        respond(
            input=[{"role": "user", "content": [{"type": "input_text", "text": "Hello!"}]}], max_output_tokens=None
        ),
        {"status": "completed"},
    ),
    Pair(
        "responses: logprobs",
        respond(include=["message.output_text.logprobs"], top_logprobs=5, reasoning={"effort": "none"}),
        {"output.-1.content.-1.logprobs.0.top_logprobs.#": 5},
    ),
    Pair(
        "responses: logprobs of a stream",
        respond(include=["message.output_text.logprobs"], top_logprobs=3, reasoning={"effort": "none"}, stream=True),
        {
            "events": lambda events: all(
                len(one["top_logprobs"]) <= 3 and one["logprob"] <= 0
                for event in events
                if event["type"] == "response.output_text.delta"
                for one in event["logprobs"]
            )
        },
    ),
    Pair(
        "responses: stream",
        respond(stream=True, max_output_tokens=None),
        {
            "types": lambda types: (
                types[0] == "response.created"
                and types[-1] == "response.completed"
                and "response.output_text.delta" in types
            )
        },
    ),
    Pair(
        "responses: text of a stream",
        respond(stream=True),
        {
            "events": lambda events: (
                "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
                == "".join(
                    part["text"]
                    for item in events[-1]["response"]["output"]
                    if item["type"] == "message"
                    for part in item["content"]
                )
            )
        },
    ),
    Pair("responses: pairs of events", respond(stream=True), {"events": has_pairs}),
    Pair(
        "responses: pairs of events of a call",
        respond(stream=True, tools=[PLACE], tool_choice="required", max_output_tokens=120),
        {"events": has_pairs},
    ),
    Pair(
        "responses: enable_response_messages",
        respond(enable_response_messages=True),
        rejected("enable_response_messages"),
        400,
        differs="raw_messages",
    ),
    Pair(
        "responses: reasoning item as input",
        respond(
            input=[
                user("Hello."),
                {
                    "type": "reasoning",
                    "id": "r1",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "A greeting."}],
                },
            ]
        ),
        {"output.#": lambda number: number > 0},
    ),
    Pair(
        "responses: history with ids",
        respond(
            input=[
                user("Be concise."),
                assistant(id="msg_1", status="completed"),
                reasoning(id="rs_1", status="completed"),
                user("Reply."),
            ]
        ),
        {"output.#": lambda number: number > 0},
    ),
    Pair(
        "responses: history without ids",
        respond(input=[user("Be concise."), assistant(), reasoning(), user("Reply.")]),
        {"output.#": lambda number: number > 0},
    ),
    Pair(
        "responses: own output as history",
        lambda first: respond(input=[user("Remember 729."), *first.body["output"], user("Which number?")]),
        lambda _: {"output.#": lambda number: number > 0},
        before=[respond(input="Remember 729.")],
    ),
    Pair(
        "responses: annotations in the history",
        respond(
            input=[
                user("Hi"),
                {
                    "type": "message",
                    "role": "assistant",
                    "id": "m1",
                    "status": "completed",
                    "content": [
                        {
                            "type": "output_text",
                            "text": "hello",
                            "annotations": [
                                {
                                    "type": "url_citation",
                                    "url": "http://x",
                                    "title": "t",
                                    "start_index": 0,
                                    "end_index": 1,
                                }
                            ],
                        }
                    ],
                },
                user("Bye"),
            ]
        ),
        {"output.#": int},
    ),
    Pair(
        "responses: call without call_id",
        respond(input=[user("Hi"), {"type": "function_call", "name": "f", "arguments": "{}"}]),
        rejected("call_id"),
        400,
    ),
    Pair(
        "responses: max_output_tokens",
        respond(max_output_tokens=5),
        {"status": "incomplete", "incomplete_details.reason": "max_output_tokens"},
    ),
    Pair(
        "responses: sampling parameters",
        respond(temperature=0.7, top_p=0.9, top_k=40, repetition_penalty=1.2, seed=42),
        {"output.#": lambda number: number > 0},
    ),
    Pair(
        "responses: chat_template_kwargs",
        respond(chat_template_kwargs={"enable_thinking": True}, max_output_tokens=60),
        {"output.0.type": "reasoning"},
    ),
    Pair(
        "responses: store",
        lambda first: Ask(f"/v1/responses/{first.body['id']}", method="GET"),
        lambda first: {"id": first.body["id"], "status": first.body["status"]},
        before=[respond()],
    ),
    Pair(
        "responses: store null",
        lambda first: Ask(f"/v1/responses/{first.body['id']}", method="GET"),
        lambda first: {"id": first.body["id"]},
        before=[respond(store=None)],
    ),
    Pair(
        "responses: store false",
        lambda first: Ask(f"/v1/responses/{first.body['id']}", method="GET"),
        lambda _: {"error.type": "not_found_error"},
        404,
        before=[respond(store=False)],
    ),
    Pair(
        "responses: background",
        respond(background=True),
        {"status": lambda status: status in ("queued", "in_progress", "completed", "incomplete")},
    ),
    Pair(
        "responses: background with store null",
        respond(background=True, store=None),
        {"background": True, "store": True},
    ),
    Pair("responses: background without store", respond(background=True, store=False), rejected("store"), 400),
    Pair(
        "responses: cancel",
        lambda first: Ask(f"/v1/responses/{first.body['id']}/cancel"),
        lambda _: {"status": "cancelled"},
        before=[respond(background=True, max_output_tokens=1900, ignore_eos=True)],
    ),
    Pair(
        "responses: cancel a completed response",
        lambda first: Ask(f"/v1/responses/{first.body['id']}/cancel"),
        lambda _: {"error.message": str},
        400,
        before=[respond()],
    ),
    Pair(
        "responses: previous_response_id",
        lambda first: respond(input="And now?", previous_response_id=first.body["id"]),
        lambda first: {"previous_response_id": first.body["id"]},
        before=[respond()],
    ),
    Pair(
        "responses: same previous_response_id twice",
        lambda first, _: respond(input="My name?", previous_response_id=first.body["id"]),
        lambda first, _: {"previous_response_id": first.body["id"]},
        before=[respond(), lambda first: respond(input="It is Mark.", previous_response_id=first.body["id"])],
    ),
    Pair(
        "responses: schema",
        respond(
            max_output_tokens=60, text={"format": {"type": "json_schema", "name": "car", "schema": CAR, "strict": True}}
        ),
        {"text": is_car},
    ),
    Pair(
        "responses: structured_outputs",
        respond(max_output_tokens=60, structured_outputs={"json": CAR}),
        {"text": is_car},
    ),
    *[
        Pair(
            f"responses: tool {name}",
            respond(input="The weather in Berlin?", tools=[PLACE], tool_choice=given, max_output_tokens=120),
            {
                "output.-1.type": "function_call",
                "output.-1.name": "get_weather",
                "output.-1.call_id": str,
                "output.-1.arguments": lambda text: "location" in json.loads(text),
            },
        )
        for name, given in (("required", "required"), ("named", PLACE_CHOICE))
    ],
    Pair(
        "responses: tool auto",
        respond(input="The weather in Berlin?", tools=[PLACE], tool_choice="auto"),
        {"output.#": lambda number: number > 0},
    ),
    Pair(
        "responses: tool with 2 tokens",
        respond(tools=[PLACE], tool_choice="required", max_output_tokens=2),
        {"output.*.type": lambda found: "function_call" not in found, "incomplete_details.reason": "max_output_tokens"},
    ),
    Pair(
        "responses: result of a call",
        lambda first: respond(
            input=[
                user("The weather?"),
                first.body["output"][-1],
                {"type": "function_call_output", "call_id": first.body["output"][-1]["call_id"], "output": "20°C"},
            ],
            max_output_tokens=None,
            max_tokens=None,
        ),
        lambda _: {"text": lambda text: len(text) > 0},
        before=[respond(tools=[PLACE], tool_choice=PLACE_CHOICE, max_output_tokens=120)],
    ),
    Pair(
        "responses: arguments in a stream",
        respond(stream=True, tools=[PLACE], tool_choice="required", max_output_tokens=120),
        {
            "events": lambda events: (
                "".join(event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta")
                == [event["item"]["arguments"] for event in events if event["type"] == "response.output_item.done"][-1]
            )
        },
    ),
    Pair(
        "responses: count tokens",
        Ask("/v1/responses/input_tokens", {"model": "tiny", "input": "Hello world, this is a test!"}),
        {"input_tokens": lambda number: number > 0},
    ),
    Pair(
        "responses: image",
        respond(
            input=[
                {"role": "user", "content": [{"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"}]}
            ]
        ),
        {"error.message": str},
        400,
        differs="images",
    ),
]
PROMPT = "This is a test prompt. vllm1"
TURNS = [
    {"role": "user", "content": "Hi there!"},
    {"role": "assistant", "content": "Nice to meet you!"},
    {"role": "user", "content": "Can I ask a question?"},
]


def sized(number: Any = int) -> Expected:
    return {
        "count": number,
        "max_model_len": 2048,
        "body": lambda body: body["count"] == len(body["tokens"]) and body.get("token_strs") is None,
    }


TOKENS = [
    *[
        Pair(
            f"tokenize: add_special_tokens {given}",
            native("/tokenize", prompt=PROMPT, add_special_tokens=given),
            sized(),
        )
        for given in (False, True)
    ],
    *[
        Pair(
            f"tokenize: chat, add_generation_prompt {generate}, {name}",
            native("/tokenize", messages=TURNS, tools=tools, add_generation_prompt=generate, add_special_tokens=False),
            sized(),
        )
        for generate in (False, True)
        for name, tools in (("no tools", None), ("tools", [WEATHER]))
    ],
    *[
        Pair(
            f"tokenize: chat with special tokens, {name}",
            native("/tokenize", messages=TURNS, tools=tools, add_special_tokens=True),
            rejected("add_special_tokens"),
            400,
            differs="special_tokens",
        )
        for name, tools in (("no tools", None), ("tools", [WEATHER]))
    ],
    *[
        Pair(
            f"tokenize: continue_final_message, {name}",
            native(
                "/tokenize",
                messages=[*TURNS, {"role": "assistant", "content": "Sure,"}],
                tools=tools,
                continue_final_message=True,
                add_generation_prompt=False,
            ),
            sized(),
        )
        for name, tools in (("no tools", None), ("tools", [WEATHER]))
    ],
    Pair(
        "tokenize: return_token_strs",
        native("/tokenize", prompt=PROMPT, return_token_strs=True),
        {
            "body": lambda body: (
                len(body["token_strs"]) == len(body["tokens"])
                and all(isinstance(text, str) for text in body["token_strs"])
            )
        },
    ),
    Pair(
        "tokenize: there and back",
        lambda ids: native("/detokenize", tokens=ids.body["tokens"]),
        lambda _: {"prompt": PROMPT},
        before=[native("/tokenize", prompt=PROMPT, add_special_tokens=False)],
    ),
    Pair("tokenize: tokenizer_info", Ask("/tokenizer_info", method="GET"), {}, 404, differs="probes"),
]
BEST = "The best thing about vLLM is that it supports many different models"
VECTORS = [
    Pair(
        "embeddings: one text",
        embed(BEST, encoding_format="float"),
        are_vectors(1)
        | {
            "data.0.embedding": is_unit,
            "body": lambda body: body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"],
        },
    ),
    Pair("embeddings: token ids", embed(IDS, encoding_format="float"), are_vectors(1) | {"usage.prompt_tokens": 5}),
    Pair("embeddings: ten texts", embed([BEST] * 10), are_vectors(10)),
    Pair("embeddings: ten lists of token ids", embed([IDS] * 10), are_vectors(10) | {"usage.prompt_tokens": 50}),
    *[
        Pair(
            f"embeddings: truncate_prompt_tokens {number}, {name}",
            embed(given, truncate_prompt_tokens=number),
            rejected("truncate_prompt_tokens"),
            400,
            differs=differs,
        )
        for number, name, given, differs in (
            (10, "texts", [BEST], "truncation"),
            (10, "token ids", IDS, "truncation"),
            (8193, "texts", [BEST], ""),
        )
    ],
    *[
        Pair(
            f"embeddings: messages {more}",
            Ask("/v1/embeddings", {"model": "tiny", "messages": TURNS, **more}),
            {"error.message": str},
            400,
            differs="" if len(more) == 2 else "chat_embeddings",
        )
        for more in (
            {},
            {"add_generation_prompt": True},
            {"continue_final_message": True},
            {"add_special_tokens": True},
            {"continue_final_message": True, "add_generation_prompt": True},
        )
    ],
    Pair("embeddings: invocations", Ask("/invocations", embed(BEST).body), {}, 404, differs="invocations"),
    Pair(
        "embeddings: base64",
        embed(BEST, encoding_format="base64"),
        lambda plain: {"data.0.embedding": lambda text: near(plain.body["data"][0]["embedding"])(unpacked(text))},
        before=[embed(BEST)],
    ),
    *[
        Pair(
            f"embeddings: {name} {given}",
            embed(BEST, **{"encoding_format": "base64", name: given}),
            rejected(name),
            400,
            differs=differs,
        )
        for name, given, differs in (
            ("embed_dtype", "float16", "vector_formats"),
            ("endianness", "big", "vector_formats"),
            ("encoding_format", "bytes", "vector_formats"),
            ("encoding_format", "bytes_only", "vector_formats"),
            ("encoding_format", "bad", ""),
            ("embed_dtype", "bad", ""),
            ("endianness", "bad", ""),
        )
    ],
    *[
        Pair(
            f"embeddings: use_activation {given}",
            embed(BEST, use_activation=given),
            rejected("use_activation"),
            400,
            differs="activation",
        )
        for given in (True, False)
    ],
    Pair(
        "embeddings: dimensions",
        embed([BEST] * 3, dimensions=16),
        {"data.#": 3, "data.*.embedding.#": lambda found: set(found) == {16}},
    ),
    Pair("embeddings: dimensions -1", embed(BEST, dimensions=-1), rejected("dimensions"), 400),
    Pair("embeddings: too many dimensions", embed(BEST, dimensions=1 << 20), rejected("dimensions"), 400),
    *[
        Pair(
            f"pooling: {task}",
            Ask("/pooling", {"model": "tiny", "input": "test", "task": task}),
            {},
            404,
            differs="pooling",
        )
        for task in ("embed", "token_embed", "classify", "token_classify")
    ],
]
QUERIES, ANSWERS = ["w1 w2", "w3"], ["w4 w5", "w6"]
SCORES = [
    *[
        Pair(f"score: {name}", Ask(path, {"model": "ranks", **body}), {}, 404, differs="pooling")
        for name, path, body in (
            ("a query and a document", "/score", {"queries": QUERIES[0], "documents": ANSWERS[0]}),
            ("a query and documents", "/score", {"queries": QUERIES[0], "documents": ANSWERS}),
            ("queries and documents", "/v1/score", {"queries": QUERIES, "documents": ANSWERS}),
            ("items", "/score", {"queries": QUERIES, "items": ANSWERS}),
            ("text_1 and text_2", "/score", {"text_1": QUERIES, "text_2": ANSWERS}),
            ("data_1 and data_2", "/score", {"data_1": QUERIES, "data_2": ANSWERS}),
        )
    ],
    Pair(
        "rerank: documents",
        rank(documents=ANSWERS),
        {"results.#": 2, "results.*.relevance_score": lambda found: found[0] >= found[1]},
    ),
    Pair(
        "rerank: document in the result",
        rank(documents=ANSWERS, return_documents=True),
        {"results.*.document.text": lambda found: sorted(found) == ANSWERS},
    ),
    Pair("rerank: top_n", rank(documents=[*ANSWERS, "w7"], top_n=2), {"results.#": 2}),
    Pair(
        "rerank: texts that are too long",
        rank(query="w1 " * 300, documents=ANSWERS),
        {"error.code": "context_length_exceeded"},
        400,
    ),
    Pair("rerank: invocations", Ask("/invocations", rank(documents=ANSWERS).body), {}, 404, differs="invocations"),
    *[
        Pair(
            f"rerank: use_activation {given}",
            rank(documents=ANSWERS, use_activation=given),
            rejected("use_activation"),
            400,
            differs="activation",
        )
        for given in (True, False)
    ],
    Pair(
        "rerank: max_tokens_per_doc",
        rank(documents=ANSWERS, max_tokens_per_doc=10),
        rejected("max_tokens_per_doc"),
        400,
        differs="activation",
    ),
    *[
        Pair(
            f"rerank: max_tokens_per_doc {number}",
            rank(documents=ANSWERS, max_tokens_per_doc=number),
            rejected("max_tokens_per_doc"),
            400,
        )
        for number in (0, -5)
    ],
    Pair("rerank: truncated documents", rank(documents=["w4 " * 300, "w6"], truncate=True), {"results.#": 2}),
]
NEW_YORK = "What's the weather like in New York today?"


def block(**given: Any) -> Ask:
    """Ask with this block, in a message of the role that may have it."""
    role = "assistant" if given["type"] in ("tool_use", "thinking", "redacted_thinking") else "user"
    result = {"type": "tool_result", "tool_use_id": given.get("id") or "toolu_01", "content": "20°C"}
    turns: list[Any] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_01", "name": "f", "input": {}}]},
    ]
    if given["type"] == "tool_use":
        turns = [turns[0], {"role": role, "content": [given]}, {"role": "user", "content": [result]}]
    elif given["type"] == "tool_result":
        turns = [*turns, {"role": role, "content": [given]}]
    elif role == "assistant":
        turns = [turns[0], {"role": role, "content": [given, {"type": "text", "text": "Hm."}]}, turns[0]]
    else:
        turns = [{"role": role, "content": [given]}]
    return message(turns)


BLOCKS: list[tuple[str, dict[str, Any], int]] = [
    ("tool_use without id", {"type": "tool_use", "name": "f", "input": {}}, 400),
    ("tool_use without name", {"type": "tool_use", "id": "toolu_01", "input": {}}, 400),
    ("tool_use with an empty name", {"type": "tool_use", "id": "toolu_01", "name": "", "input": {}}, 400),
    ("tool_use without input", {"type": "tool_use", "id": "toolu_01", "name": "f"}, 400),
    ("tool_use", {"type": "tool_use", "id": "toolu_01", "name": "f", "input": {"city": "NYC"}}, 200),
    ("tool_use with empty input", {"type": "tool_use", "id": "toolu_01", "name": "f", "input": {}}, 200),
    ("tool_result without tool_use_id", {"type": "tool_result"}, 400),
    ("tool_result", {"type": "tool_result", "tool_use_id": "toolu_01"}, 200),
    ("tool_result with content", {"type": "tool_result", "tool_use_id": "toolu_01", "content": "result"}, 200),
    ("text without text", {"type": "text"}, 400),
    ("text", {"type": "text", "text": "hello"}, 200),
    ("image without source", {"type": "image"}, 400),
    ("thinking without thinking", {"type": "thinking", "signature": "abc"}, 400),
    ("redacted_thinking without data", {"type": "redacted_thinking"}, 400),
]
MESSAGES = [
    Pair(
        "messages: simple",
        message("how are you!"),
        {"role": "assistant", "stop_reason": lambda reason: reason in ("end_turn", "max_tokens")},
    ),
    Pair("messages: system", message("how are you!", system="you are a helpful assistant"), {"role": "assistant"}),
    Pair(
        "messages: stream",
        message("how are you!", stream=True),
        {"types": lambda types: types[0] == "message_start" and types[-1] == "message_stop"},
    ),
    Pair(
        "messages: tool",
        message(
            NEW_YORK,
            max_tokens=120,
            tools=[anthropic_tool("get_current_weather", "location")],
            tool_choice={"type": "any"},
        ),
        {"stop_reason": "tool_use", "role": "assistant"},
    ),
    Pair(
        "messages: tool in a stream",
        message(
            NEW_YORK,
            max_tokens=120,
            stream=True,
            tools=[anthropic_tool("get_current_weather", "location")],
            tool_choice={"type": "any"},
        ),
        {"events.-2.delta.stop_reason": "tool_use"},
    ),
    *[
        Pair(f"messages: block {name}", block(**given), {"type": "message" if status == 200 else "error"}, status)
        for name, given, status in BLOCKS
    ],
    Pair(
        "messages: block redacted_thinking",
        block(type="redacted_thinking", data="opaque"),
        {"type": "error"},
        400,
        differs="redacted",
    ),
    *[
        Pair(
            f"messages: block {given['type']} with an empty id",
            block(**given),
            {"type": "message"},
            differs="empty_ids",
        )
        for given in (
            {"type": "tool_use", "id": "", "name": "f", "input": {}},
            {"type": "tool_result", "tool_use_id": ""},
        )
    ],
]
SERVER = [
    Pair("server: health", Ask("/health", method="GET")),
    Pair(
        "server: models",
        Ask("/v1/models", method="GET"),
        {"object": "list", "data.*.id": lambda ids: "tiny" in ids, "data.*.object": "model"},
    ),
    Pair("server: version", Ask("/version", method="GET"), {}, 404, differs="probes"),
    Pair("server: load", Ask("/load", method="GET"), {}, 404, differs="probes"),
    Pair(
        "server: x-request-id of the client",
        Ask("/v1/completions", complete().body, headers={"x-request-id": "caller"}),
        {"headers.x-request-id": "caller"},
    ),
    Pair("server: new x-request-id", complete(), {"headers.x-request-id": re.compile("^.{16,}$")}),
]
TABLE = Table(
    "vLLM's entrypoint tests",
    [*COMPLETIONS, *CHATS, *FUNCTIONS, *RESPONSES, *TOKENS, *VECTORS, *SCORES, *MESSAGES, *SERVER],
    DIFFERENCES,
)
