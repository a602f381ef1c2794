"""Decode draft tokens along with the last token, and accept the draft tokens that the model also samples.

This package may import `scheduling`, and the packages that docs/architecture.md lists above `scheduling`. The package
uses neither llama.cpp nor threads, and only `draft_model` reads a clock. See docs/adr/015-speculation.md.
"""
