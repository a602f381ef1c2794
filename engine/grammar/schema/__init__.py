"""Rewrite JSON Schemas for llguidance.

Keywords that llguidance can't enforce are rewritten, rejected, or ignored with a warning.

May use: `errors`, the table of limits, and `grammar.matcher` for llguidance's limits.
"""

from .preparing import Prepared, prepare_schema

__all__ = ["Prepared", "prepare_schema"]
