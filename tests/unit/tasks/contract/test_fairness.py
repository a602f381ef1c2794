"""Fairness keys of users below a tenant."""

from __future__ import annotations

import pytest

from cellama.tasks.contract.fairness import fairness_key_below, fairness_key_of, is_fairness_key

LONG = "x" * 64


def test_user_is_a_level_below_its_tenant() -> None:
    assert fairness_key_below("acme", "anna@example.org") == "acme/anna@example.org"


@pytest.mark.parametrize("user", ["a/b", "/", "a\0b", LONG, "", "\ud800"])
def test_user_that_is_not_a_valid_level_is_replaced_with_a_digest(user: str) -> None:
    key = fairness_key_below("acme", user)
    assert is_fairness_key(key)
    assert key.startswith("acme/")
    assert key.count("/") == 1
    assert key != fairness_key_below("acme", user + "2")


def test_users_share_the_key_of_their_tenant_when_the_key_is_too_long() -> None:
    tenant = fairness_key_of(LONG + LONG)
    assert fairness_key_below(tenant, "anna") == tenant


def test_users_without_a_tenant_share_the_empty_key() -> None:
    assert fairness_key_below("", "anna") == ""
