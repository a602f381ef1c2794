"""API keys of the gateway: who a request comes from, what that key may ask for, how much of it.

May use: `callers` and `errors` of the gateway, the connections and the contract of `tasks`; no framework of HTTP.
"""
