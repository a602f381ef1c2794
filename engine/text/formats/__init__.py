"""Formats in which models write tool calls: readers parse them, and grammars enforce them.

May use: `errors`. Pure.
"""
