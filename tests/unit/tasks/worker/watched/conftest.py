"""The spans of a process, as for the tests of `traces`."""

from ...traces.conftest import spans, traces

__all__ = ["spans", "traces"]
