"""The tenant that the ledger records for a job."""

from __future__ import annotations

from typing import Any

import pytest

from cellama.tasks.state.ledger import tenant_of

ACME, OTHER = {"cache_scope": "acme"}, {"cache_scope": "other"}


@pytest.mark.parametrize(
    ("task", "args", "kwargs", "tenant"),
    [
        ("generate", ["tiny", "Hi"], ACME, "acme"),
        ("chat", ["tiny"], {"cache_scope": "acme\x1fsalt"}, "acme"),
        ("chat", ["tiny"], {"cache_scope": "\x1fsalt"}, ""),
        ("generate", ["tiny", "Hi"], {}, ""),
        ("generate", ["tiny", "Hi"], {"cache_scope": ["acme"]}, ""),
        ("chunk", ["tiny", [{"kind": "chat", "params": ACME}] * 2], {}, "acme"),
        ("chunk", ["tiny"], {"lines": [{"kind": "chat", "params": ACME}]}, "acme"),
        ("chunk", ["tiny", [{"kind": "chat", "params": ACME}, {"kind": "chat", "params": OTHER}]], {}, ""),
        ("chunk", ["tiny", [{"kind": "chat", "params": ACME}, {"kind": "embed", "params": {}}]], {}, ""),
        ("chunk", ["tiny", [{"params": None}, "x", None]], ACME, ""),
        ("unknown", [], ACME, "acme"),
    ],
)
def test_tenant_is_the_scope_that_the_whole_job_shares(
    task: str, args: list[Any], kwargs: dict[str, Any], tenant: str
) -> None:
    assert tenant_of(f"cellama.{task}", args, kwargs) == tenant
