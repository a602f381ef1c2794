"""Redis as every process reaches it: one way to connect, few errors, its clock, the check of a server.

May use: `contract`, and the settings.
"""
