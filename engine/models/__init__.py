"""Models by their ids: where their files come from, whether they fit, what they can do, when they go.

May use: `core`, `llama`, `memory`, and what is above these.
"""
