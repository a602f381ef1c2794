"""Rewrite JSON Schemas for llguidance.

Keywords that llguidance can't enforce are rewritten, rejected, or ignored with a warning.

This package may import `errors`, the table of limits, and llguidance's limits from `grammar.matcher`.
"""

from .preparing import Prepared, prepare_schema

__all__ = ["Prepared", "prepare_schema"]
