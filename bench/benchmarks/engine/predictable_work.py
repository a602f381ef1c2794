"""Draw prompts whose continuations are predictable to different degrees."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from cellama.bench.harness.engines import GREEDY, random_prompts
from cellama.bench.tiny_model.corpus import CITIES, NAMES, PLOTS, story_parts
from cellama.engine import Model, SamplingParams

COPIED, FORCED, UNPREDICTABLE, TOLD = "copying", "forced", "unpredictable", "stories"
# Tokens per request, by number of streams. With these numbers, all runs take about as long.
NUM_NEW = {1: 128, 4: 112, 16: 80, 64: 56}
NUM_PEOPLE = 5
SCHEMA = {
    "type": "array",
    "minItems": NUM_PEOPLE,
    "maxItems": NUM_PEOPLE,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer"},
            "city": {"enum": list(CITIES)},
        },
        "required": ["name", "age", "city"],
        "additionalProperties": False,
    },
}


class PredictableWork(NamedTuple):
    """Prompts and the parameters for generating their continuations."""

    prompts: list[list[int]]
    num_new: int
    params: dict[str, Any]


def copying(count: int) -> list[str]:
    """Return prompts that repeat the opening of a story, repeat it with a different name, or quote one of two stories.

    The bundled model was trained on these stories, so it copies from the prompt.
    """
    told = [(animal, name, plot.names) for animal, plot in PLOTS.items() for name in plot.names]
    texts = []
    for at in range(count):
        animal, name, names = told[(at // 3) % len(told)]
        story, other = _story(animal, name), _story(animal, names[names.index(name) - 1])
        if at % 3 == 0:
            texts.append(f"{story}\n{_opening(animal, name)}")
        elif at % 3 == 1:
            texts.append(f"{other}\n{_opening(animal, name)}")
        else:
            first = f'"One day I will {PLOTS[animal].wish}," said {name}.'
            texts.append(f"{story} {_story(*told[(at // 3 + 5) % len(told)][:2])}\n{first}")
    return texts


def stories(count: int) -> list[str]:
    """Return story openings. A small model that was trained on the stories can predict the continuations."""
    told = [(animal, name) for animal, plot in PLOTS.items() for name in plot.names]
    return [_opening(*told[at % len(told)]) for at in range(count)]


def _story(animal: str, name: str) -> str:
    return "".join(story_parts(animal, name))


def _opening(animal: str, name: str) -> str:
    return "".join(story_parts(animal, name)[:3])


def _copying(model: Model, count: int, streams: int) -> PredictableWork:
    return PredictableWork([model.tokenize(text) for text in copying(count)], NUM_NEW[streams], {"sampling": GREEDY})


def _stories(model: Model, count: int, streams: int) -> PredictableWork:
    return PredictableWork([model.tokenize(text) for text in stories(count)], NUM_NEW[streams], {"sampling": GREEDY})


def _forced(model: Model, count: int, streams: int) -> PredictableWork:
    """Return work that generates JSON for a schema with fixed keys."""
    asked = [
        f"<|im_start|>user\nMake JSON: name {NAMES[at % len(NAMES)]}, age {7 + at}, city {CITIES[at % len(CITIES)]}"
        "<|im_end|>\n<|im_start|>assistant\n"
        for at in range(count)
    ]
    sampling = SamplingParams(temperature=0, json_schema=json.dumps(SCHEMA))
    prompts = [model.tokenize(text, parse_special=True) for text in asked]
    return PredictableWork(prompts, 400, {"sampling": sampling, "ignore_eos": False})


def _unpredictable(model: Model, count: int, streams: int) -> PredictableWork:
    """Return work that samples from the whole vocabulary, for models with random weights."""
    sampling = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
    return PredictableWork(random_prompts(count, 16, seed=streams), NUM_NEW[streams], {"sampling": sampling})


WORKS: dict[str, Callable[[Model, int, int], PredictableWork]] = {
    COPIED: _copying,
    FORCED: _forced,
    UNPREDICTABLE: _unpredictable,
    TOLD: _stories,
}
