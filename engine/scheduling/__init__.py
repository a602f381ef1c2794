"""Scheduling: which sequences wait, which have slots, and the batch of the next step.

May use: `kvcache`, and the packages above it. Pure: no llama.cpp, no clock, no threads.
"""
