"""Metrics are counted, and formatted as text that the parser of Prometheus accepts."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cellama.tasks.metrics import exposition
from cellama.tasks.metrics.exposition import MetricsServer, text_of
from cellama.tasks.metrics.figures import OTHER, Bounded, Figures, Meter

from ....conftest import wait_until

FIRST, REQUESTS = "cellama_first_token_seconds", "cellama_requests_total"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples_of(text: bytes) -> Samples:
    """Return the values in a text by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def samples(meter: Meter) -> Samples:
    figures = Figures()
    meter.add_to(figures)
    return samples_of(text_of(figures))


def test_histogram_counts_a_value_equal_to_a_bound_in_the_bucket_of_that_bound() -> None:
    meter = Meter()
    for value in (0.001, 0.0011, 5000.0, -1.0):
        meter.observe(FIRST, value, "m")
    values = samples(meter)
    buckets = {dict(labels)["le"]: value for (name, labels), value in values.items() if name == f"{FIRST}_bucket"}
    assert (buckets["0.001"], buckets["0.0025"], buckets["3600.0"], buckets["+Inf"]) == (2, 3, 3, 4)
    labels = frozenset({("model", "m")})
    assert values[f"{FIRST}_count", labels] == 4
    assert values[f"{FIRST}_sum", labels] == pytest.approx(5000.0021)


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "ü", "{}"])
def test_label_value_may_be_any_string(name: str) -> None:
    meter = Meter()
    meter.count(REQUESTS, name, "stop")
    assert samples(meter)[REQUESTS, frozenset({("model", name), ("finish_reason", "stop")})] == 1


def test_figures_reject_metrics_and_labels_missing_from_the_table() -> None:
    figures = Figures()
    figures.add("cellama_invented", 1)
    with pytest.raises(KeyError, match="cellama_invented"):
        text_of(figures)
    figures = Figures()
    figures.add(REQUESTS, 1, "only the model")
    with pytest.raises(KeyError, match="labels"):
        text_of(figures)


def test_meter_counts_correctly_on_several_threads() -> None:
    meter = Meter()

    def count() -> None:
        for _ in range(1000):
            meter.count(REQUESTS, "m", "stop")
            meter.observe(FIRST, 0.5, "m")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    values = samples(meter)
    assert values[REQUESTS, frozenset({("model", "m"), ("finish_reason", "stop")})] == 4000
    assert values[f"{FIRST}_count", frozenset({("model", "m")})] == 4000


def test_bounded_label_replaces_values_above_the_limit() -> None:
    bounded = Bounded(2)
    assert [bounded.of(value) for value in "abcab"] == ["a", "b", OTHER, "a", "b"]
    assert bounded.num_dropped == 1


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    meter = Meter()
    meter.count(REQUESTS, "m", "stop", by=7)

    def collect() -> Figures:
        figures = Figures()
        meter.add_to(figures)
        return figures

    server = MetricsServer("127.0.0.1", 0, collect)
    yield server
    server.close()


def test_server_returns_the_metrics(server: MetricsServer) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        values = samples_of(answer.read())
    assert values[REQUESTS, frozenset({("model", "m"), ("finish_reason", "stop")})] == 7


@pytest.mark.parametrize(("path", "method", "status"), [("/", "GET", 404), ("/metrics", "POST", 501)])
def test_server_answers_404_for_other_paths(server: MetricsServer, path: str, method: str, status: int) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", method=method)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)
    caught.value.close()
    assert caught.value.code == status


def test_server_frees_its_port(server: MetricsServer) -> None:
    second = MetricsServer("127.0.0.1", 0, Figures)
    port = second.port
    second.close()
    MetricsServer("127.0.0.1", port, Figures).close()
    with pytest.raises(OSError, match="in use"):
        MetricsServer("127.0.0.1", server.port, Figures)


def test_server_disconnects_a_client_that_sends_too_slowly(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposition, "CLIENT_TIMEOUT_S", 0.2)
    with socket.create_connection(("127.0.0.1", server.port), timeout=0.02) as client:

        def is_closed() -> bool:
            try:
                client.sendall(b"G")
                return not client.recv(1)
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        wait_until(is_closed, "the end of the connection")
