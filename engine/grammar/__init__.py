"""What the text of a request may be: JSON Schema, regular expressions and Lark by llguidance, GBNF by an automaton.

May use: `errors`, and the table of limits. Pure; docs/adr/006-grammars.md.
"""
