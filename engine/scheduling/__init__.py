"""Scheduling: which sequences wait, which have slots, and the batch of the next step.

May use: `kvcache`, and the packages above it. This package is pure: it uses no llama.cpp, clock or threads.
"""
