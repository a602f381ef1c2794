"""Derive how a model marks up its replies, from conversations that differ in one thing and that its template renders.

May use: `formats`. Pure.
"""
