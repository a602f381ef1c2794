"""What a model will take, before it is loaded; and on which devices.

May use: all of `llama`, `memory`, and what is above these.
"""
