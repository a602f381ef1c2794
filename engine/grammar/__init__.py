"""Constrain the text of a request: JSON Schema, regular expressions and Lark by llguidance, GBNF by an automaton.

May use: `errors`, and the table of limits. Pure. See docs/adr/006-grammars.md.
"""
