"""Text is released when it is final, however its bytes are split."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies as st

from cellama.engine.text.detokenizer import StopMatch, TextStream

ALPHABET = st.sampled_from(list("abc é日🦊"))
TEXTS = st.text(ALPHABET, max_size=30)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3).map(tuple)


def run(data: bytes, stops: tuple[str, ...], cuts: list[int]) -> tuple[list[str], str | None]:
    """Return the released pieces, and the stop string that ended them."""
    stream = TextStream(stops)
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    pieces: list[str] = []
    for start, end in itertools.pairwise(edges):
        released = stream.push(data[start:end])
        if isinstance(released, StopMatch):
            return [*pieces, released.released], released.stop
        pieces.append(released)
    return [*pieces, stream.flush()], None


def expected(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Return the expected text and stop string by brute force: the longest of the matches that end first."""
    matches = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    if not matches:
        return text, None
    _, start, stop = min(matches)
    return text[:start], stop


@given(TEXTS, STOPS, st.lists(st.integers(0, 200), max_size=8))
def test_text_stream_releases_the_same_text_however_it_is_split(
    text: str, stops: tuple[str, ...], cuts: list[int]
) -> None:
    pieces, stop = run(text.encode(), stops, cuts)
    assert ("".join(pieces), stop) == expected(text, stops)


@given(TEXTS, STOPS)
def test_text_stream_never_releases_the_start_of_a_stop_string(text: str, stops: tuple[str, ...]) -> None:
    final, _ = expected(text, stops)
    released_text = ""
    stream = TextStream(stops)
    for byte in text.encode():
        released = stream.push(bytes([byte]))
        released_text += released.released if isinstance(released, StopMatch) else released
        assert final.startswith(released_text)
        if isinstance(released, StopMatch):
            break


@given(st.binary(max_size=40), st.lists(st.integers(0, 200), max_size=8))
def test_text_stream_replaces_invalid_bytes_the_same_way_however_they_are_split(data: bytes, cuts: list[int]) -> None:
    assert "".join(run(data, (), cuts)[0]) == "".join(run(data, (), [])[0])


def test_text_stream_drops_an_incomplete_character_at_the_end_of_the_text() -> None:
    stream = TextStream()
    assert stream.push("é日".encode()[:-1]) == "é"
    assert stream.flush() == ""


@pytest.mark.parametrize(("stops", "text", "stop"), [(("bc", "abcd"), "a", "bc"), (("b", "ab"), "", "ab")])
def test_text_stream_finds_the_longest_stop_string_that_ends_first(
    stops: tuple[str, ...], text: str, stop: str
) -> None:
    assert TextStream(stops).push(b"abcd") == StopMatch(text, stop)


def test_text_stream_finds_a_stop_string_that_is_completed_once_stopping_is_allowed() -> None:
    stream = TextStream(("ab", "bc"), keeps_stop=True)
    assert stream.push(b"ab", can_stop=False) == "a"
    assert stream.push(b"c") == StopMatch("bc", "bc")
