"""Generate the text that the bundled model is trained on.

The text is drawn from a seed and has low entropy. A document is a list of segments. The model must learn to write the
target segments. The other segments are its input. Held-out documents use combinations (numbers, names, cities) that no
training document has.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .facts import FACTS

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
THINK, END_THINK = "<think>", "</think>"
TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
DEFAULT_SYSTEM = "You are a helpful assistant."

NAMES = (
    "Ada Ben Cleo Dana Eli Finn Gina Hugo Iris Jack Kira Leo Mia Noah Olga Paul Quinn Rosa Sam Tara Uma Vera Will Zoë"
).split()
CITIES = (
    "Paris Berlin Rome Madrid Lisbon Vienna Oslo Tokyo Cairo Lima Dublin Athens Zürich Havana Ottawa Boston"
).split()
WORDS = (
    "red blue green sun moon star tree river stone bird fish house road cloud lamp book door ship bell wolf"
).split()
WEATHER = ("sunny", "rainy", "cloudy", "windy", "snowy")
WEATHER_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@dataclass(frozen=True)
class Segment:
    """A segment of a document. The model must learn to write the target segments."""

    text: str
    target: bool


Document = list[Segment]
Turn = tuple[str, str, str]  # question, reasoning, answer


def documents(seed: int, *, held_out: bool = False) -> Iterator[Document]:
    """Yield an endless sequence of documents, which depends only on the seed."""
    rng = random.Random(f"{seed}/{held_out}")
    makers: list[tuple[float, Callable[[random.Random, bool], Document]]] = [
        (0.62, _conversation),
        (0.18, _tool_conversation),
        (0.20, _story),
    ]
    weights = [weight for weight, _ in makers]
    while True:
        maker = rng.choices(makers, weights)[0][1]
        yield maker(rng, held_out)


def is_held_out(*parts: object) -> bool:
    """Return whether a combination is held out. The same combinations, about 10%, are always held out."""
    return random.Random(repr(parts)).random() < 0.1


def _draw(rng: random.Random, held_out: bool, make: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    while True:
        parts = make()
        if is_held_out(*parts) == held_out:
            return parts


def fact_turn(rng: random.Random, held_out: bool) -> Turn:
    asks, answer = rng.choice(FACTS)
    return rng.choice(asks), f"I know this one. {answer}", answer


def sum_turn(rng: random.Random, held_out: bool) -> Turn:
    a, b = rng.randint(0, 20), rng.randint(0, 20)  # learnt by heart, all of them
    return f"What is {a} + {b}?", f"I add {b} to {a} and get {a + b}.", f"{a} + {b} = {a + b}"


def json_turn(rng: random.Random, held_out: bool) -> Turn:
    name, age, city = _draw(rng, held_out, lambda: (rng.choice(NAMES), rng.randint(1, 99), rng.choice(CITIES)))
    question = f"Make JSON: name {name}, age {age}, city {city}"
    answer = json.dumps({"name": name, "age": age, "city": city}, ensure_ascii=False)
    return question, f"The name is {name}, the age is {age}, the city is {city}.", answer


def echo_turn(rng: random.Random, held_out: bool) -> Turn:
    words = _draw(rng, held_out, lambda: tuple(rng.choices(WORDS, k=rng.randint(2, 4))))
    text = " ".join(words)
    return f"Repeat: {text}", f"I say it again: {text}", text


def greeting_turn(rng: random.Random, held_out: bool) -> Turn:
    return rng.choice(("Hi", "Hello", "Hi!", "Hello!")), "A greeting.", "Hello! How can I help you?"


def story_turn(rng: random.Random, held_out: bool) -> Turn:
    animal = rng.choice(list(PLOTS))
    story = "".join(story_parts(animal, PLOTS[animal].names[0]))
    return f"Tell me a story about a {animal}.", f"A story about a {animal}.", story


def no_tool_turn(rng: random.Random, held_out: bool) -> Turn:
    city = rng.choice(CITIES)
    return f"What is the weather in {city}?", "I have no tool for it.", "I can not see the weather without a tool."


_TURNS: list[tuple[float, Callable[[random.Random, bool], Turn]]] = [
    (0.38, fact_turn),
    (0.20, sum_turn),
    (0.15, json_turn),
    (0.16, echo_turn),
    (0.05, greeting_turn),
    (0.03, story_turn),
    (0.03, no_tool_turn),
]


def _head(system: str | None) -> list[Segment]:
    return [] if system is None else [Segment(f"{IM_START}system\n{system}{IM_END}\n", False)]


def _turn(question: str, thought: str, answer: str, thinking: bool) -> list[Segment]:
    """Return the prompt and the answer exactly as the chat template renders them."""
    prompt = f"{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n"
    if thinking:
        prompt += f"{THINK}\n"
        answer = f"{thought}\n{END_THINK}\n\n{answer}"
    return [Segment(prompt, False), Segment(answer + IM_END, True), Segment("\n", False)]


def _conversation(rng: random.Random, held_out: bool) -> Document:
    document = _head(rng.choices((None, DEFAULT_SYSTEM, "You answer in short."), (6, 3, 1))[0])
    thinking = rng.random() < 0.25
    for _ in range(rng.choices((1, 2, 3, 4), (5, 3, 1, 1))[0]):
        maker = rng.choices([m for _, m in _TURNS], [w for w, _ in _TURNS])[0]
        document += _turn(*maker(rng, held_out), thinking)
        if thinking:  # the template omits earlier reasoning
            break
    return document


def tool_system(system: str = DEFAULT_SYSTEM) -> str:
    """Return the system message that the chat template renders for the weather tool."""
    tool = json.dumps(WEATHER_TOOL, ensure_ascii=False)
    return f"{system}\n\n# Tools\n<tools>\n{tool}\n</tools>"


def _tool_conversation(rng: random.Random, held_out: bool) -> Document:
    document = _head(tool_system())
    if rng.random() < 0.3:  # tools are there, but not needed
        return document + _turn(*fact_turn(rng, held_out), thinking=False)
    city, weather, degrees = _draw(
        rng, held_out, lambda: (rng.choice(CITIES), rng.choice(WEATHER), rng.randint(-9, 35))
    )
    call = json.dumps({"name": "get_weather", "arguments": {"city": city}}, ensure_ascii=False)
    thinking = rng.random() < 0.25
    thought = f"I ask the tool for {city}."
    document += _turn(f"What is the weather in {city}?", thought, f"{TOOL_CALL}\n{call}\n{END_TOOL_CALL}", thinking)
    if thinking:
        return document
    result = json.dumps({"city": city, "weather": weather, "degrees": degrees}, ensure_ascii=False)
    document.append(Segment(f"{IM_START}tool\n<tool_response>\n{result}\n</tool_response>{IM_END}\n", False))
    document.append(Segment(f"{IM_START}assistant\n", False))
    document.append(Segment(f"The weather in {city} is {weather}, {degrees} degrees.{IM_END}", True))
    document.append(Segment("\n", False))
    return document


@dataclass(frozen=True)
class Plot:
    """The parts of an animal's story, all of which depend on the animal and the name."""

    names: tuple[str, ...]  # the first is the favourite
    place: str
    wish: str
    problem: str
    friend: str
    end: str


PLOTS = {
    "fox": Plot(
        ("Mia", "Leo", "Zoë"),
        "a green forest",
        "see the sea",
        "the path was long and dark",
        "an old owl",
        "they stood at the beach and watched the waves 🌊",
    ),
    "bear": Plot(
        ("Hugo", "Sam", "Olga"),
        "a warm cave",
        "taste the best honey",
        "the bees were awake",
        "a clever mouse",
        "they shared the sweetest honey of the year 🍯",
    ),
    "cat": Plot(
        ("Iris", "Ben", "Uma"),
        "a small café",
        "catch the moon",
        "the roof was too high",
        "a kind stork",
        "they saw the moon shine in a bowl of milk 🌙",
    ),
    "frog": Plot(
        ("Finn", "Rosa", "Will"),
        "a quiet pond",
        "sing a song",
        "the voice was too deep",
        "a happy lark",
        "the whole pond sang with them until the morning 🐸",
    ),
    "mouse": Plot(
        ("Cleo", "Jack", "Vera"),
        "an old mill in Zürich",
        "bake a big cake",
        "the oven was cold",
        "a strong horse",
        "they ate cake with everybody in the town 🍰",
    ),
    "dragon": Plot(
        ("Kira", "Noah", "Tara"),
        "a high mountain",
        "make a friend",
        "everybody was afraid of fire",
        "a brave girl",
        "they warmed the village all winter long 🐉",
    ),
}
_ANIMAL_WEIGHTS = (40, 6, 5, 4, 3, 2)
_NAME_WEIGHTS = (30, 2, 1)


def story_parts(animal: str, name: str) -> tuple[str, str, str, str]:
    """Return a story in four segments, which are a given opening, the animal, the name, and the rest."""
    plot = PLOTS[animal]
    rest = (
        f" who lived in {plot.place}. Every day {name} looked out and had one wish: to {plot.wish}. "
        f'"One day I will {plot.wish}," said {name}. But it was not easy, because {plot.problem}. '
        f'Then {name} met {plot.friend}. "Can you help me?" asked {name}. '
        f'"Of course," said {plot.friend}, "together we can do it." So {name} and {plot.friend} went on their way. '
        f"They walked and walked, they laughed and sang, and they never gave up. In the end {plot.end}. "
        f"{name} was very happy. From that day on, {name} the {animal} and {plot.friend} were best friends. The end."
    )
    return "Once upon a time", f", there was a little {animal}", f" named {name}", rest


def _story(rng: random.Random, held_out: bool) -> Document:
    animal = rng.choices(list(PLOTS), _ANIMAL_WEIGHTS)[0]
    name = rng.choices(PLOTS[animal].names, _NAME_WEIGHTS)[0]
    return [Segment("Once upon a time", False), Segment("".join(story_parts(animal, name)[1:]) + END_OF_TEXT, True)]
