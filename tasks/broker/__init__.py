"""Celery and kombu as we need them: channels, messages, pool, revokes, results. It builds on their private parts.

May use: `contract`, `connection`, `state`, `calls`.
"""
