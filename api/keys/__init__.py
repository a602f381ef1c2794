"""The API keys that there are: what is kept of them, in Redis or in a file. The gateway asks, `cellama keys` writes.

May use: the settings, the connections and the contract of `tasks`.
"""
