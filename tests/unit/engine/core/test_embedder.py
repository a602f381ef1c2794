"""Tests of the embedder on the fake backend: batches, turns, order and errors."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from cellama.engine import (
    DecodeFailed,
    Embedder,
    EmbeddingCancelled,
    EmbeddingHandle,
    EngineStopped,
    InvalidRequest,
    PromptTooLong,
    RequestFailed,
    Watchdog,
)
from cellama.engine.fake import FakeEmbeddingBackend

from ....conftest import wait_until

PATIENCE_S = 30
BLOCKER = [255]


class GatedBackend(FakeEmbeddingBackend):
    """A backend that delays its first call until the test has submitted everything."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)
        self.entered, self.gate = threading.Event(), threading.Event()

    def embed(self, texts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        self.entered.set()
        assert self.gate.wait(PATIENCE_S)
        return super().embed(texts)


@pytest.fixture
def backend() -> GatedBackend:
    return GatedBackend()


@pytest.fixture
def embedder(backend: GatedBackend) -> Iterator[Embedder]:
    embedder = Embedder(backend)
    yield embedder
    backend.gate.set()
    assert embedder.close()


def occupy(embedder: Embedder, backend: GatedBackend) -> EmbeddingHandle:
    """Return a text that is being computed until the gate opens, so that other texts arrive in the meantime."""
    handle = embedder.submit([BLOCKER])
    assert backend.entered.wait(PATIENCE_S)
    return handle


def texts_of(caller: int, count: int, length: int = 4) -> list[list[int]]:
    return [[caller, number, *[7] * (length - 2)] for number in range(count)]


def test_texts_from_several_callers_share_batches_in_turn(embedder: Embedder, backend: GatedBackend) -> None:
    occupy(embedder, backend)
    many = embedder.submit(texts_of(1, 20))
    few = embedder.submit(texts_of(2, 2))
    backend.gate.set()
    many.result(PATIENCE_S), few.result(PATIENCE_S)
    shared = next(call for call in backend.calls if (2, 0, 7, 7) in call)
    assert [text[:2] for text in shared] == [(1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (1, 3), (1, 4), (1, 5)]
    assert max(map(len, backend.calls)) == backend.max_texts


def test_vectors_are_in_the_order_of_each_callers_texts(embedder: Embedder, backend: GatedBackend) -> None:
    backend.gate.set()
    handles = [embedder.submit(texts_of(caller, 13), normalize=False) for caller in range(5)]
    for caller, handle in enumerate(handles):
        expected = [FakeEmbeddingBackend().embed([text])[0] for text in texts_of(caller, 13)]
        assert np.array_equal(handle.result(PATIENCE_S), expected)


def test_batch_has_at_most_batch_tokens_unless_a_single_text_is_longer(
    embedder: Embedder, backend: GatedBackend
) -> None:
    backend.batch_tokens = 10
    backend.gate.set()
    embedder.submit([*texts_of(1, 6), [1] * 64, *texts_of(2, 2)]).result(PATIENCE_S)
    sizes = [[len(text) for text in call] for call in backend.calls]
    assert sizes == [[4, 4], [4, 4], [4, 4], [64], [4, 4]]


def test_vectors_have_unit_length_and_the_requested_dimensions(embedder: Embedder, backend: GatedBackend) -> None:
    backend.gate.set()
    raw = embedder.submit([[1, 2]], normalize=False).result(PATIENCE_S)[0]
    unit = embedder.submit([[1, 2]]).result(PATIENCE_S)[0]
    assert np.allclose(unit, raw / np.linalg.norm(raw))
    assert embedder.submit([[1, 2]], dimensions=1).result(PATIENCE_S)[0].tolist() == [1.0]
    with pytest.raises(InvalidRequest, match="dimensions is 3; it must be from 1 to 2"):
        embedder.submit([[1]], dimensions=3)


def test_only_the_caller_gets_an_error_when_its_text_also_fails_alone(
    embedder: Embedder, backend: GatedBackend
) -> None:
    occupy(embedder, backend)
    backend.poison = 99
    bad = embedder.submit([[1, 2], [99], [3]])
    good = embedder.submit(texts_of(5, 3))
    backend.gate.set()
    assert len(good.result(PATIENCE_S)) == 3
    with pytest.raises(DecodeFailed, match="for a text of this request"):
        bad.result(PATIENCE_S)


class RaisingBackend(GatedBackend):
    """A backend that fails with an unexpected error for a poisoned text, or for every text."""

    always = False

    def embed(self, texts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        vectors = super().embed(texts)
        if self.always or any(99 in text for text in texts):
            raise OverflowError("nobody foresaw this")
        return vectors


def test_only_the_caller_gets_an_error_when_its_text_fails_unexpectedly() -> None:
    backend = RaisingBackend()
    embedder = Embedder(backend)
    occupy(embedder, backend)
    bad, good = embedder.submit([[1, 2], [99], [3]]), embedder.submit(texts_of(5, 3))
    backend.gate.set()
    assert len(good.result(PATIENCE_S)) == 3
    with pytest.raises(DecodeFailed, match="nobody foresaw this for a text of this request; other requests were not"):
        bad.result(PATIENCE_S)
    assert len(embedder.submit(texts_of(6, 3)).result(PATIENCE_S)) == 3
    assert embedder.close()


def test_only_the_caller_gets_an_error_when_its_vectors_cannot_be_assembled(
    embedder: Embedder, backend: GatedBackend
) -> None:
    occupy(embedder, backend)
    bad, good = embedder.submit(texts_of(1, 2)), embedder.submit(texts_of(2, 2))
    bad.vectors.append(np.zeros((3, 5), np.float32))
    bad.texts.append((1,))
    backend.gate.set()
    assert len(good.result(PATIENCE_S)) == 2
    with pytest.raises(RequestFailed, match="other requests were not affected"):
        bad.result(PATIENCE_S)


def test_embedder_with_a_broken_backend_ends_the_process_or_fails_all_requests() -> None:
    backend, reasons = RaisingBackend(), list[str]()
    embedder = Embedder(backend)
    Watchdog(end=reasons.append).watch(embedder.pulse)
    backend.always = True
    handles = [occupy(embedder, backend), *(embedder.submit(texts_of(caller, 2)) for caller in range(3))]
    backend.gate.set()
    errors = [type(handle.future.exception(PATIENCE_S)) for handle in handles]
    assert len(reasons) == 1
    assert "failed: OverflowError" in reasons[0]
    assert errors.count(DecodeFailed) == 2
    assert errors.count(EngineStopped) == 2
    wait_until(lambda: not embedder.is_busy, "the end of all")


def test_cancelled_texts_are_not_computed(embedder: Embedder, backend: GatedBackend) -> None:
    occupy(embedder, backend)
    cancelled, other = embedder.submit(texts_of(1, 3)), embedder.submit(texts_of(2, 1))
    cancelled.cancel()
    backend.gate.set()
    other.result(PATIENCE_S)
    with pytest.raises(EmbeddingCancelled):
        cancelled.result(PATIENCE_S)
    assert not any(text[0] == 1 for call in backend.calls for text in call)


def test_invalid_texts_are_rejected_and_long_texts_are_truncated_when_requested(
    embedder: Embedder, backend: GatedBackend
) -> None:
    backend.gate.set()
    with pytest.raises(
        PromptTooLong, match=r"texts\.1 has 65 tokens, but the model's limit is 64; split the text or set trunc"
    ):
        embedder.submit([[1], [2] * 65])
    with pytest.raises(InvalidRequest, match=r"texts\.0 is empty"):
        embedder.submit([[]])
    embedder.submit([[2] * 65], truncate=True).result(PATIENCE_S)
    assert backend.calls[-1] == [(2,) * 64]


def test_truncated_text_keeps_its_ending_tokens() -> None:
    backend = FakeEmbeddingBackend()
    embedder = Embedder(backend, ending=(8, 9))
    texts = [[1] + [2] * 80 + [8, 9], [1] + [2] * 80, [1, 8, 9]]
    embedder.submit(texts, truncate=True).result(PATIENCE_S)
    assert [text for call in backend.calls for text in call] == [
        (1, *[2] * 61, 8, 9),
        (1, *[2] * 63),  # token ids of a caller, which never had them
        (1, 8, 9),
    ]
    assert embedder.close()


def test_close_fails_waiting_requests_and_rejects_new_requests(backend: GatedBackend) -> None:
    embedder = Embedder(backend)
    running, waiting = occupy(embedder, backend), embedder.submit(texts_of(1, 2))
    closing = threading.Thread(target=embedder.close)
    closing.start()
    wait_until(lambda: embedder.is_closed, "the embedder takes no more")
    with pytest.raises(EngineStopped, match="the embedder is closed"):
        embedder.submit([[1]])
    backend.gate.set()
    closing.join(PATIENCE_S)
    assert len(running.result(PATIENCE_S)) == 1
    with pytest.raises(EngineStopped, match="closed before the request finished"):
        waiting.result(PATIENCE_S)
    assert not embedder.is_busy


def test_number_of_threads_can_change_between_batches(embedder: Embedder, backend: GatedBackend) -> None:
    running = occupy(embedder, backend)
    embedder.use_threads(3)
    assert (embedder.threads, backend.threads) == (3, 1)
    other = embedder.submit(texts_of(1, 1))
    backend.gate.set()
    running.result(PATIENCE_S)
    other.result(PATIENCE_S)
    assert backend.threads == 3


def test_idle_embedder_keeps_no_texts_in_memory(embedder: Embedder, backend: GatedBackend) -> None:
    backend.gate.set()
    handle = embedder.submit(texts_of(1, 3))
    handle.result(PATIENCE_S)
    seen = weakref.ref(handle)
    del handle
    wait_until(lambda: seen() is None, "the texts gone")
