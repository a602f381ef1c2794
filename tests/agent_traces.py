"""Agents with tools, reasoning and long tool results, whose model writes given replies in the markup of many families.

Each client is stateless, and sends every reply back in the format of its API. The arguments of calls were parsed and
written again with other spacing and in another order. Half of the clients omit the reasoning.
"""

from __future__ import annotations

import functools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cellama.bench.harness.scripted import PROCESSOR, temperature_of, write_script
from cellama.bench.models.templated import write_templated
from cellama.engine.bundled import TINY_PATH
from cellama.engine.models.model import Tokenizer
from cellama.engine.text.chat_template import for_template
from cellama.engine.text.template_process import Renderer

from .gateways import GatewayProcess
from .unit.engine.text.styles import CALLS, CHANNELS, THINK, derived, renderer, template

END = "<|im_end|>"
ENDS = re.compile(r"<\|im_end\|>|<\|call\|>|<\|return\|>")
SCRIPT = "script.json"
MAX_TURNS = 45  # per family
TEMPLATES = Path(__file__).parent / "unit" / "engine" / "text" / "templates"
RESULT = "The frog sat by the river and looked at line {i}. It was green, and the water was cold and deep. " * 8
SYSTEM = "You are a careful agent. Read the files of the forest one by one, and answer in a few words. " * 6
_LAST_USER = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"""
# Without the reasoning of turns before the last user message.
STRIPPED = "{% if loop.index0 > ns.last %}" + THINK + "{% endif %}"


@dataclass(frozen=True)
class Family:
    """A chat template, and what its replies can contain."""

    source: str
    thinks: bool = True
    opened: bool = False  # whether the prompt opens the reasoning
    text_before_calls: bool = True
    several_calls: bool = True


def _style(calls: str, *, stripped: bool = False, opened: bool = False, **options: Any) -> Family:
    begin = "{{ '<think>\n' }}" if opened else ""
    source = template(CALLS[calls], STRIPPED if stripped else THINK, begin)
    return Family((_LAST_USER if stripped else "") + source, opened=opened, **options)


def _file(name: str, **options: Any) -> Family:
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8").replace("<|eot_id|>", END)
    return Family(source, thinks=False, text_before_calls=False, **options)


FAMILIES = {
    "hermes": _style("hermes", stripped=True),
    "hermes-opened": _style("hermes", stripped=True, opened=True),
    "llama3": _style("llama3", thinks=False, text_before_calls=False, several_calls=False),
    "mistral": _file("mistral"),
    "mistral-tags": _style("mistral with tags"),
    "deepseek-r1": _style("deepseek r1", stripped=True, opened=True),
    "glm": _style("glm", stripped=True),
    "nemotron": _style("nemotron"),
    "command-r": _style("command-r", stripped=True),
    "gpt-oss": Family(CHANNELS, text_before_calls=False, several_calls=False),
    "qwen-coder": _style("qwen coder", stripped=True),
    "minimax": _style("minimax", stripped=True, opened=True),
}
TOOL: dict[str, Any] = {
    "name": "read_file",
    "description": "Read a line of a file",
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
        "required": ["path", "line"],
    },
}


OPENAI_TOOL: dict[str, Any] = {"type": "function", "function": TOOL}


def reply_to_write(family: Family, i: int) -> dict[str, Any]:
    """Return turn `i` of the model: mostly one or two calls, and every fifth time a text."""
    reply: dict[str, Any] = {"role": "assistant", "content": f"I have read part {i} of the forest."}
    if family.thinks:
        reply["reasoning"] = f"The user wants part {i}, so I look at it."
    if i % 5 == 4:
        return reply
    if not family.text_before_calls:
        reply["content"] = ""
    numbers = (i, i + 100) if family.several_calls and i % 5 == 2 else (i,)
    reply["tool_calls"] = [
        {
            "id": f"call{number:05}",
            "type": "function",
            "function": {"name": "read_file", "arguments": {"path": f"src/part_{number}.py", "line": number}},
        }
        for number in numbers
    ]
    return reply


def text_of_reply(family: Family, i: int) -> str:
    """Return a turn as its model writes it."""
    rendering, as_text = _rendering_of(family.source)
    question = [{"role": "user", "content": "Well?"}]
    answer = for_template(reply_to_write(family, i), arguments_as_text=as_text)
    prompt, whole = (
        rendering.answer({"mark": False, "messages": messages, "variables": {"tools": [OPENAI_TOOL], **variables}})
        for messages, variables in ((question, {"add_generation_prompt": True}), ([*question, answer], {}))
    )
    text: str = whole["text"]
    assert text.startswith(prompt["text"])
    text = text[len(prompt["text"]) :]
    return ENDS.split(text)[0]


@functools.cache
def _rendering_of(source: str) -> tuple[Renderer, bool]:
    """Return a renderer of the template, and whether it expects the arguments of calls as text."""
    return renderer(source), derived(source).arguments_as_text


def write_models(folder: Path, families: Iterable[str], prefix: str) -> str:
    """Write a model with each template, and the script of their replies. Return the setting `models`."""
    models, script = [], {}
    with Tokenizer(str(TINY_PATH)) as tokenizer:
        for name in families:
            path = folder / f"{name}.gguf"
            write_templated(path, FAMILIES[name].source)
            models.append({"id": f"{prefix}-{name}", "source": str(path), **AGENT_MODEL})
            for i in range(MAX_TURNS):
                text = text_of_reply(FAMILIES[name], i)
                script[number_of(name, i)] = tokenizer.tokenize(text, add_special=False, parse_special=True)
    write_script(folder / SCRIPT, script)
    return json.dumps(models)


AGENT_MODEL: dict[str, Any] = {
    "n_parallel": 2,
    "ctx_per_slot": 24576,
    "threads": 1,
    "logits_processors": [PROCESSOR],
}


def number_of(family: str, i: int) -> int:
    return 1 + list(FAMILIES).index(family) * MAX_TURNS + i


class Turn(NamedTuple):
    """The usage of one turn, and the tool calls or the text of its reply."""

    prompt: int
    completion: int
    cached: int
    calls: list[tuple[str, Any]]  # id and arguments
    text: str
    job: str


@dataclass
class Agent(ABC):
    """A stateless client of one API in a conversation. `send` makes one request, and appends the reply."""

    gateway: GatewayProcess
    prefix: str
    family: str
    keeps_reasoning: bool
    history: list[dict[str, Any]] = field(default_factory=list)
    question: str = "Read the whole forest."

    def turn(self, i: int) -> Turn:
        """Request turn `i`, and append the reply and the results of its calls."""
        if not self.history:
            self.history += self.first()
        turn = self.send(temperature_of(number_of(self.family, i)))
        self.history += self.results(turn, RESULT.replace("{i}", str(i)))
        return turn

    def post(self, path: str, body: Mapping[str, Any], **headers: str) -> Any:
        answer = self.gateway.post(path, json={"model": f"{self.prefix}-{self.family}", **body}, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def first(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.question}]

    @abstractmethod
    def send(self, temperature: float) -> Turn:
        """Make the request of a turn."""

    @abstractmethod
    def results(self, turn: Turn, text: str) -> list[dict[str, Any]]:
        """Return the messages with the results of the calls in a turn."""


class ChatAgent(Agent):
    def first(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": SYSTEM}, *super().first()]

    def send(self, temperature: float) -> Turn:
        body = {"messages": self.history, "tools": [OPENAI_TOOL], "temperature": temperature, "max_tokens": 400}
        answer = self.post("/v1/chat/completions", body)
        message, usage = answer["choices"][0]["message"], answer["usage"]
        reply: dict[str, Any] = {"role": "assistant", "content": message.get("content")}
        calls = [(call["id"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls") or ()]
        if calls:
            reply["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {
                        "name": "read_file",
                        "arguments": json.dumps(arguments, separators=(",", ":"), sort_keys=True),
                    },
                }
                for call_id, arguments in calls
            ]
        if self.keeps_reasoning and message.get("reasoning_content"):
            reply["reasoning_content"] = message["reasoning_content"]
        self.history.append(reply)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        text = message.get("content") or ""
        job = answer["id"].partition("-")[2]
        return Turn(usage["prompt_tokens"], usage["completion_tokens"], cached, calls=calls, text=text, job=job)

    def results(self, turn: Turn, text: str) -> list[dict[str, Any]]:
        if not turn.calls:
            return [{"role": "user", "content": "Go on. " + text}]
        return [{"role": "tool", "tool_call_id": call_id, "content": text} for call_id, _ in turn.calls]


class MessagesAgent(Agent):
    def send(self, temperature: float) -> Turn:
        tool = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}
        body = {"system": SYSTEM, "messages": self.history, "tools": [tool], "temperature": temperature}
        answer = self.post("/v1/messages", {**body, "max_tokens": 400}, **{"anthropic-version": "2023-06-01"})
        blocks, usage = answer["content"], answer["usage"]
        kept = [block for block in blocks if self.keeps_reasoning or block["type"] != "thinking"]
        self.history.append({"role": "assistant", "content": kept})
        calls = [(block["id"], block["input"]) for block in blocks if block["type"] == "tool_use"]
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        cached = usage.get("cache_read_input_tokens") or 0
        job = answer["id"].partition("_")[2]
        return Turn(usage["input_tokens"] + cached, usage["output_tokens"], cached, calls=calls, text=text, job=job)

    def results(self, turn: Turn, text: str) -> list[dict[str, Any]]:
        if not turn.calls:
            return [{"role": "user", "content": "Go on. " + text}]
        results = [{"type": "tool_result", "tool_use_id": call_id, "content": text} for call_id, _ in turn.calls]
        return [{"role": "user", "content": results}]


class ResponsesAgent(Agent):
    def send(self, temperature: float) -> Turn:
        body = {"instructions": SYSTEM, "input": self.history, "temperature": temperature, "max_output_tokens": 400}
        answer = self.post("/v1/responses", {**body, "tools": [{"type": "function", **TOOL}], "store": False})
        items, usage = answer["output"], answer["usage"]
        for item in items:
            if item["type"] == "function_call":
                self.history.append({**item, "arguments": json.dumps(json.loads(item["arguments"]), sort_keys=True)})
            elif item["type"] == "message" or self.keeps_reasoning:
                self.history.append(item)
        calls = [(each["call_id"], json.loads(each["arguments"])) for each in items if each["type"] == "function_call"]
        text = "".join(part["text"] for each in items if each["type"] == "message" for part in each["content"])
        cached = usage["input_tokens_details"]["cached_tokens"]
        job = answer["id"].partition("_")[2]
        return Turn(usage["input_tokens"], usage["output_tokens"], cached, calls=calls, text=text, job=job)

    def results(self, turn: Turn, text: str) -> list[dict[str, Any]]:
        if not turn.calls:
            return [{"role": "user", "content": "Go on. " + text}]
        return [{"type": "function_call_output", "call_id": call_id, "output": text} for call_id, _ in turn.calls]


AGENTS: dict[str, Callable[..., Agent]] = {
    "chat": ChatAgent,
    "messages": MessagesAgent,
    "responses": ResponsesAgent,
}


def check_turn(family: str, i: int, turn: Turn) -> None:
    """Check that the gateway has returned the scripted reply."""
    wanted = reply_to_write(FAMILIES[family], i)
    arguments = [call["function"]["arguments"] for call in wanted.get("tool_calls", ())]
    assert [each for _, each in turn.calls] == arguments
    assert turn.text.strip() == wanted["content"]
