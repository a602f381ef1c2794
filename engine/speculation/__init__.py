"""Decode draft tokens along with the last token, and accept the draft tokens that the model also samples.

May use: `scheduling` and the packages above it. This package uses neither llama.cpp nor threads, and only `draft_model`
reads a clock. See docs/adr/015-speculation.md.
"""
