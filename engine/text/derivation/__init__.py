"""Finds out how a model marks up its replies, from what its chat template writes for conversations that differ in one
thing. Uses the room of formats. Pure.
"""
