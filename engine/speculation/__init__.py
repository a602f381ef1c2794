"""Tokens that are guessed, decoded together with the last one, and kept as far as the model chooses the same.

May use: `scheduling`, and what is above it. Pure: no llama.cpp, no clock, no threads. docs/adr/015-speculation.md
"""
