"""The commands for whoever keeps a gateway: its API keys, and where its webhooks go.

May use: the modules of `cli`, `keys`, `webhooks`.
"""
