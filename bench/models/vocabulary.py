"""Create a vocabulary that is as large as the vocabularies of current models, from a seed and without a model.

The words are built from syllables, so that they share prefixes about as often as in real vocabularies. Shared prefixes
affect the speed of grammars.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

JSON_PARTS = ('{"', '",', '":', '": ', '": "', '"}', '"},', '", "', "},", "}]", "[{", "[]", "{}", '": [', '"]', '\\"')
CODE_PARTS = ("\\n", "\\u", "://", "...", "--", "==", "=>", "()", "();", "</", "/>", "</s>")
_SCRIPTS = ((0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0x0400, 0x04FF), (0x0600, 0x06FF), (0x1F300, 0x1F600))
_WORDS = 0.85  # the share of words in Latin letters


def vocabulary(size: int, seed: int = 0) -> list[bytes]:
    """Return unique tokens: bytes, numbers, blanks, parts of JSON and code, words, and letters of other scripts."""
    random = Random(seed)
    tokens = {bytes([byte]): None for byte in range(256)}
    for part in (*JSON_PARTS, *CODE_PARTS, *(str(number) for number in range(1000))):
        tokens[part.encode()] = None
    for count in range(2, 64):
        tokens |= {blank * count: None for blank in (b" ", b"\n", b"\t")}
    while len(tokens) < size * _WORDS:
        tokens[_word(random).encode()] = None
    while len(tokens) < size:
        tokens["".join(_letter(random) for _ in range(random.choice((1, 1, 2, 3)))).encode()] = None
    return list(tokens)[:size]


def _word(random: Random) -> str:
    syllables = [_syllable(random) for _ in range(random.choice((1, 1, 2, 2, 3, 4)))]
    word = "".join(syllables) + random.choice(("", "", "", "ing", "ed", "'s", "_id", "."))
    return random.choice((" ", " ", "")) + random.choice((word, word, word.capitalize(), word.upper()))


def _syllable(random: Random) -> str:
    return random.choice("bcdfghjklmnprstvwz") + random.choice("aeiouy") + random.choice(("", "", "n", "s", "r", "t"))


def _letter(random: Random) -> str:
    return chr(random.randint(*random.choice(_SCRIPTS)))


def greedy_spelling(tokens: Sequence[bytes]) -> Callable[[bytes], list[int]]:
    """Return a tokenizer that always takes the longest token. The vocabulary must contain every byte."""
    ids = {token: number for number, token in enumerate(tokens)}
    longest = max(map(len, tokens))

    def spell(text: bytes) -> list[int]:
        found: list[int] = []
        at = 0
        while at < len(text):
            end = next(end for end in range(min(len(text), at + longest), at, -1) if text[at:end] in ids)
            found.append(ids[text[at:end]])
            at = end
        return found

    return spell
