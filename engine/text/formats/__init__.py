"""Formats in which models write tool calls: they are read from replies, and enforced by grammars.

May use: `errors`. Pure.
"""
