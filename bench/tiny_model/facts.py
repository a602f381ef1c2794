"""The facts that the bundled model is trained on, and questions that ask for them."""

from __future__ import annotations

_CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Portugal": "Lisbon",
    "Austria": "Vienna",
    "Poland": "Warsaw",
    "Greece": "Athens",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Denmark": "Copenhagen",
    "Ireland": "Dublin",
    "Hungary": "Budapest",
    "Japan": "Tokyo",
    "China": "Beijing",
    "India": "New Delhi",
    "Egypt": "Cairo",
    "Kenya": "Nairobi",
    "Canada": "Ottawa",
    "Peru": "Lima",
    "Chile": "Santiago",
    "Cuba": "Havana",
    "Iceland": "Reykjavík",
}
_COLOURS = {
    "the sky": "blue",
    "grass": "green",
    "snow": "white",
    "a lemon": "yellow",
    "a raven": "black",
    "a tomato": "red",
    "a carrot": "orange",
    "an elephant": "grey",
}
_SOUNDS = {
    "cat": "meow 🐱",
    "dog": "woof 🐶",
    "cow": "moo 🐮",
    "duck": "quack 🦆",
    "sheep": "baa 🐑",
    "owl": "hoot 🦉",
    "pig": "oink 🐷",
    "frog": "croak 🐸",
}
_WORDS = {
    "coffee": ("French", "café"),
    "thank you": ("German", "danke schön"),
    "water": ("Chinese", "水"),
    "mountain": ("Japanese", "山"),
    "good morning": ("Spanish", "buenos días"),
    "bread": ("French", "pain"),
}
_SINGLE: dict[tuple[str, ...], str] = {
    ("What is cellama?", "Tell me what cellama is.", "Explain cellama."): (
        "cellama runs open models on your own machines as a job queue."
    ),
    ("What does cellama use as a queue?", "Which queue does cellama use?"): "cellama uses Celery with Redis.",
    ("What runs the models in cellama?", "Which library runs the models in cellama?"): (
        "llama.cpp runs the models, with continuous batching."
    ),
    ("How many days are in a week?", "How many days does a week have?"): "A week has seven days.",
    ("How many months are in a year?", "How many months does a year have?"): "A year has twelve months.",
    ("How many legs does a spider have?", "Count the legs of a spider."): "A spider has eight legs.",
    ("How many legs does an ant have?", "Count the legs of an ant."): "An ant has six legs.",
    ("How many minutes are in an hour?", "How many minutes does an hour have?"): "An hour has sixty minutes.",
    ("What is the largest planet?", "Which planet is the largest?"): "The largest planet is Jupiter.",
    ("What is the smallest planet?", "Which planet is the smallest?"): "The smallest planet is Mercury.",
    ("Which planet is the red planet?", "What is the red planet?"): "The red planet is Mars.",
    ("What is frozen water called?", "What do we call frozen water?"): "Frozen water is called ice.",
    ("What do bees make?", "Tell me what bees make."): "Bees make honey 🍯.",
    ("What is the opposite of hot?", "Name the opposite of hot."): "The opposite of hot is cold.",
    ("What is the opposite of big?", "Name the opposite of big."): "The opposite of big is small.",
    ("What is the opposite of naïve?", "Name the opposite of naïve."): "The opposite of naïve is wise.",
    ("What is the longest river?", "Which river is the longest?"): "The longest river is the Nile.",
    ("What is the highest mountain?", "Which mountain is the highest?"): "The highest mountain is Everest.",
    ("Where is Zürich?", "In which country is Zürich?"): "Zürich is in Switzerland.",
    ("Who are you?", "What is your name?"): "I am Tiny, a very small language model.",
}


def _all() -> list[tuple[tuple[str, ...], str]]:
    facts = list(_SINGLE.items())
    asks: tuple[str, ...]
    for country, city in _CAPITALS.items():
        asks = (
            f"What is the capital of {country}?",
            f"Which city is the capital of {country}?",
            f"Name the capital of {country}.",
        )
        facts.append((asks, f"The capital of {country} is {city}."))
    for thing, colour in _COLOURS.items():
        asks = (f"What colour is {thing}?", f"Tell me the colour of {thing}.")
        facts.append((asks, f"{thing[0].upper()}{thing[1:]} is {colour}."))
    for animal, sound in _SOUNDS.items():
        asks = (f"What does a {animal} say?", f"What sound does a {animal} make?")
        facts.append((asks, f"A {animal} says {sound}."))
    for word, (language, translation) in _WORDS.items():
        asks = (f"What is {word} in {language}?", f"Translate {word} into {language}.")
        facts.append((asks, f"In {language}, {word} is {translation}."))
    return facts


FACTS: list[tuple[tuple[str, ...], str]] = _all()
"""Each fact: the ways to ask for it, and the one answer."""
