"""How models mark up their replies: forms of tool calls, read out of what a model wrote, and forced on it by a grammar.

May use: `errors`. Pure.
"""
