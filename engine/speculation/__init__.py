"""Draft tokens, which are decoded together with the last token, and kept as far as the model samples the same.

May use: `scheduling`, and what is above it. No llama.cpp, no threads, and no clock but in `draft_model`.
docs/adr/015-speculation.md
"""
