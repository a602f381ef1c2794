"""API keys, stored without their secrets in Redis or in a file.

The gateway checks keys, and `cellama keys` writes them.

This package may use the settings, and the connections and the contract of `tasks`.
"""
