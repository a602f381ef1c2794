"""Scheduling: which sequences wait, which have slots, and the batch of the next step.

May use: `kvcache`, and the packages above it. This package doesn't use llama.cpp, clocks or threads.
"""
