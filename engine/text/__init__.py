"""Text on its way in and out: chat templates, control tokens, tokens back to text, the parts of a reply.

May use: `errors`, `system`. Nothing here knows a model or llama.cpp.
"""
