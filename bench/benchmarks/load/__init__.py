"""Benchmarks for users' own models, with concurrent callers, mixed lengths, arrivals, bulk runs and the gateway.

The wheel contains only this directory and the harness.
"""
