"""From a call to a message: Celery's options, steps of a canvas, jobs pushed together with their entries.

May use: `contract`, `connection`, `state`.
"""
