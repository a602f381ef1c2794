"""Redis as every process reaches it: one way to connect, few errors, its clock, the check of a server; the private
parts of Celery and kombu.

May use: `contract`, and the settings.
"""
