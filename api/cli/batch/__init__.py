"""The commands `cellama batch`: bulk runs that are begun, and those that are looked at and cancelled from anywhere.

May use: `cli`, `api.batch`, `client`, and `tasks` but for what runs in workers.
"""
