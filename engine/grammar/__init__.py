"""Constrain generated text, using llguidance for JSON Schema, regular expressions and Lark, or an automaton for GBNF.

This package may import `errors` and the table of limits. See docs/adr/006-grammars.md.
"""
