"""Parse and enforce tool calls in the formats that models use, with a reader and a grammar for each format.

This package may import `errors`.
"""
