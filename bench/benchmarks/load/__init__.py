"""Benchmarks for users' own models: concurrent callers, mixed lengths, arrivals, bulk runs and the gateway.

Only this directory and the harness are in the wheel.
"""
