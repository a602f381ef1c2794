"""Request structured output through Python clients with pydantic models, as their users would.

`python -m cellama.bench.benchmarks.structured.structured_clients URL` calls each installed client of `CLIENTS` with
each model of `everyday_schemas`, and prints a JSON line per call. The program only requires pydantic and the clients,
so it runs in environments without cellama's dependencies.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from .everyday_schemas import MODELS

VALID, LOOSE, BY_CLIENT, BY_GATEWAY, WRONG = "valid", "loose", "refused by client", "refused by gateway", "wrong"
# Errors of pydantic about values that the JSON Schema of the model allows, because pydantic checks more than it writes.
BEYOND_SCHEMA = {"decimal_parsing", "decimal_max_digits", "decimal_max_places", "decimal_whole_digits", "date_future"}
BEYOND_SCHEMA |= {"url_scheme", "url_parsing", "ip_any_address", "ip_v4_network", "json_invalid", "value_error"}
MODEL = "tiny"
QUESTION: list[Any] = [{"role": "user", "content": "Hi"}]
MAX_TOKENS = 400  # the longest answers to these schemas have about 150
NUM_AT_ONCE = 16
TIMEOUT_S = 120.0

Ask = Callable[[type[BaseModel]], Any]


@dataclass(frozen=True)
class SchemaClient:
    """A client's package, the way it is called, and a function that connects to a gateway's URL without `/v1`."""

    package: str
    how: str
    connect: Callable[[str], Ask]
    weakened: Collection[str] = ()  # models of which it sends less than pydantic's JSON Schema


@dataclass(frozen=True)
class SchemaCall:
    """The outcome of one call.

    `detail` is the error or the problem with the answer. The outcome is `valid` if the answer is an instance of the
    model. It is `loose` if pydantic rejects the answer because of a rule that the sent JSON Schema does not contain.
    Other outcomes are `refused by client` (nothing was sent), `refused by gateway` (an HTTP error) and `wrong`.
    """

    client: str
    version: str
    how: str
    model: str
    outcome: str
    detail: str = ""


def _openai(url: str) -> Any:
    return importlib.import_module("openai").OpenAI(base_url=f"{url}/v1", **_once())


def _anthropic(url: str) -> Any:
    return importlib.import_module("anthropic").Anthropic(base_url=url, **_once())


def _once() -> dict[str, Any]:
    return {"api_key": "none", "max_retries": 0, "timeout": TIMEOUT_S}


def _openai_chat(url: str) -> Ask:
    client = _openai(url)

    def ask(model: type[BaseModel]) -> Any:
        answer = client.chat.completions.parse(
            model=MODEL, messages=QUESTION, max_tokens=MAX_TOKENS, response_format=model
        )
        return answer.choices[0].message.parsed

    return ask


def _openai_chat_tools(url: str) -> Ask:
    client, openai = _openai(url), importlib.import_module("openai")

    def ask(model: type[BaseModel]) -> Any:
        answer = client.chat.completions.parse(
            model=MODEL,
            messages=QUESTION,
            max_tokens=MAX_TOKENS,
            tools=[openai.pydantic_function_tool(model)],
            tool_choice="required",
        )
        return answer.choices[0].message.tool_calls[0].function.parsed_arguments

    return ask


def _openai_responses(url: str) -> Ask:
    client = _openai(url)

    def ask(model: type[BaseModel]) -> Any:
        return client.responses.parse(
            model=MODEL, input=QUESTION, max_output_tokens=MAX_TOKENS, text_format=model
        ).output_parsed

    return ask


def _anthropic_parse(url: str) -> Ask:
    client = _anthropic(url)

    def ask(model: type[BaseModel]) -> Any:
        return client.messages.parse(
            model=MODEL, messages=QUESTION, max_tokens=MAX_TOKENS, output_format=model
        ).parsed_output

    return ask


def _anthropic_tools(url: str) -> Ask:
    client = _anthropic(url)

    def ask(model: type[BaseModel]) -> Any:
        answer = client.messages.create(
            model=MODEL,
            messages=QUESTION,
            max_tokens=MAX_TOKENS,
            tools=[{"name": "answer", "input_schema": model.model_json_schema()}],
            tool_choice={"type": "tool", "name": "answer"},
        )
        [call] = [block for block in answer.content if block.type == "tool_use"]
        return model.model_validate_json(json.dumps(call.input))

    return ask


def _instructor(mode: str) -> Callable[[str], Ask]:
    def connect(url: str) -> Ask:
        instructor = importlib.import_module("instructor")
        wrap = instructor.from_anthropic if mode.startswith("ANTHROPIC") else instructor.from_openai
        make = _anthropic if mode.startswith("ANTHROPIC") else _openai
        client = wrap(make(url), mode=instructor.Mode[mode])

        def ask(model: type[BaseModel]) -> Any:
            return client.chat.completions.create(
                model=MODEL,
                messages=QUESTION,
                max_tokens=MAX_TOKENS,
                response_model=model,
                max_retries=0,
            )

        return ask

    return connect


def _langchain_openai(method: str, **options: Any) -> Callable[[str], Ask]:
    def connect(url: str) -> Ask:
        chat = importlib.import_module("langchain_openai").ChatOpenAI(
            model=MODEL, base_url=f"{url}/v1", max_tokens=MAX_TOKENS, **_once(), **options
        )
        return lambda model: chat.with_structured_output(model, method=method).invoke("Hi")

    return connect


def _langchain_anthropic(method: str) -> Callable[[str], Ask]:
    def connect(url: str) -> Ask:
        chat = importlib.import_module("langchain_anthropic").ChatAnthropic(
            model=MODEL, base_url=url, max_tokens=MAX_TOKENS, **_once()
        )
        return lambda model: chat.with_structured_output(model, method=method).invoke("Hi")

    return connect


RECURSIVE = ("Tree", "Linked", "Person")  # langchain's function_calling writes {} for a reference within itself
CLIENTS = (  # Anthropic's client takes bounds, patterns and tuples out of the schemas of output formats
    SchemaClient("openai", "chat.completions.parse(response_format)", _openai_chat),
    SchemaClient("openai", "chat.completions.parse(tools)", _openai_chat_tools),
    SchemaClient("openai", "responses.parse(text_format)", _openai_responses),
    SchemaClient("anthropic", "messages.parse(output_format)", _anthropic_parse, weakened=MODELS),
    SchemaClient("anthropic", "messages.create(tools)", _anthropic_tools),
    SchemaClient("instructor", "Mode.JSON_SCHEMA", _instructor("JSON_SCHEMA")),
    SchemaClient("instructor", "Mode.TOOLS", _instructor("TOOLS")),
    SchemaClient("instructor", "Mode.ANTHROPIC_TOOLS", _instructor("ANTHROPIC_TOOLS")),
    SchemaClient("langchain-openai", "json_schema", _langchain_openai("json_schema")),
    SchemaClient(
        "langchain-openai", "json_schema, Responses", _langchain_openai("json_schema", use_responses_api=True)
    ),
    SchemaClient("langchain-openai", "function_calling", _langchain_openai("function_calling"), weakened=RECURSIVE),
    SchemaClient("langchain-anthropic", "json_schema", _langchain_anthropic("json_schema"), weakened=MODELS),
    SchemaClient(
        "langchain-anthropic", "function_calling", _langchain_anthropic("function_calling"), weakened=RECURSIVE
    ),
)


class _Requests(logging.Handler):
    """Collects the HTTP statuses that each thread receives, from the logs of httpx and httpx2."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._local = threading.local()
        for name in ("httpx", "httpx2"):
            logger = logging.getLogger(name)
            logger.setLevel(logging.INFO)
            logger.addHandler(self)
            logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        if found := re.search(r'"HTTP/[\d.]+ (\d{3}) ', record.getMessage()):
            self.of_thread().append(int(found[1]))

    def of_thread(self) -> list[int]:
        statuses: list[int] = self._local.__dict__.setdefault("statuses", [])
        return statuses


def installed() -> Mapping[str, str]:
    """Return the versions of the clients installed in this environment."""
    versions = {}
    for package in {client.package for client in CLIENTS}:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def calls(url: str, models: Mapping[str, type[BaseModel]] = MODELS) -> Iterator[SchemaCall]:
    """Call each installed client with each model, with several concurrent calls.

    Yield the calls in the order of the lists.
    """
    versions, requests = installed(), _Requests()

    def call(client: SchemaClient, ask: Ask, name: str) -> SchemaCall:
        statuses = requests.of_thread()
        statuses.clear()
        outcome, detail = _outcome(client, ask, models[name], statuses)
        return SchemaCall(client.package, versions[client.package], client.how, name, outcome, detail)

    with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        made = [
            threads.submit(call, client, ask, name)
            for client in CLIENTS
            if client.package in versions
            for ask in [client.connect(url)]
            for name in models
        ]
        yield from (future.result() for future in made)


def _outcome(client: SchemaClient, ask: Ask, model: type[BaseModel], statuses: list[int]) -> tuple[str, str]:
    try:
        answer = ask(model)
    except Exception as error:  # clients raise what they like, and the next call must be made
        detail = f"{type(error).__name__}: {error}"[:1000]
        if not statuses:
            return BY_CLIENT, detail
        if statuses[-1] >= 400:
            return BY_GATEWAY, detail
        return (LOOSE if _is_beyond_schema(error, model.__name__ in client.weakened) else WRONG), detail
    return (VALID, "") if isinstance(answer, model) else (WRONG, f"not a {model.__name__}: {answer!r}"[:1000])


def _is_beyond_schema(error: BaseException | None, is_weakened: bool) -> bool:
    """Return whether pydantic rejected values that the sent JSON Schema allows. Clients wrap pydantic's error."""
    while error is not None and not isinstance(error, ValidationError):
        error = error.__cause__ or error.__context__
    return error is not None and all(
        found["loc"] and (is_weakened or found["type"] in BEYOND_SCHEMA) for found in error.errors()
    )


def is_refused_rightly(call: SchemaCall) -> bool:
    """Return whether the gateway rejected a schema that OpenAI also rejects or that `strict` can't enforce."""
    as_tool = "tool" in call.how.lower() or call.how == "function_calling"
    return call.outcome == BY_GATEWAY and (
        call.model == "SetOfText" or (as_tool and call.model in ("Numbers", "Scalar", "Described"))
    )


if __name__ == "__main__":
    for found in calls(sys.argv[1]):
        print(json.dumps(asdict(found)), flush=True)
