"""Grammars: GBNF and JSON Schema become an automaton over bytes, which says what may come next.

May use: `errors`, and the table of limits. Pure; docs/adr/006-grammars.md.
"""
