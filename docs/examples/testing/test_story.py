"""A unit test with a stub, and a test with a real worker."""

from types import SimpleNamespace

from story import title_of

from cellama.api import Client


def test_title_has_four_words_with_a_stub() -> None:
    job = SimpleNamespace(result=lambda timeout: {"text": "named Mia who lived in a forest"})
    client = SimpleNamespace(generate=lambda *args, **kwargs: job)
    assert title_of(client, "fox") == "named Mia who lived"  # type: ignore[arg-type]


def test_title_is_the_same_each_time_with_a_worker() -> None:
    with Client() as client:
        assert title_of(client, "fox") == title_of(client, "fox") != ""
