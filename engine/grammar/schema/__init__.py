"""JSON Schemas as llguidance takes them: what it can't enforce is rewritten, refused, or ignored with a warning.

May use: `errors`, the table of limits, and `grammar.matcher` for llguidance's limits. Pure.
"""

from .preparing import Prepared, prepare_schema

__all__ = ["Prepared", "prepare_schema"]
