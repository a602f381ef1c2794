"""The longest wait with which a request is accepted, by its tier and timeout."""

from __future__ import annotations

import math

import pytest

from cellama.api.http.running import longest_wait


@pytest.mark.parametrize(
    ("max_wait_s", "tier", "timeout_s", "expected"),
    [
        (600, "default", None, 600),
        (600, "priority", None, 600),
        (600, "flex", None, math.inf),
        (0, "default", None, math.inf),
        (600, "default", 5, 5),
        (600, "flex", 5.5, 5.5),
        (0, "priority", 5, 5),
        (2, "default", 5, 2),
        (2, "default", "soon", 2),  # the job's payload refuses it
        (2, "default", -1, 2),
    ],
)
def test_longest_wait_is_the_shorter_of_the_limit_and_the_timeout(
    max_wait_s: float, tier: str, timeout_s: object, expected: float
) -> None:
    assert longest_wait(max_wait_s, tier, timeout_s)[0] == expected
