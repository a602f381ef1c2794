"""Processes on this machine: a Redis, and children that are started again.

May use: nothing of ours.
"""
