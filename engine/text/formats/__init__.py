"""Parse and enforce tool calls in the formats that models use, with a reader and a grammar for each format.

May use: `errors`.
"""
