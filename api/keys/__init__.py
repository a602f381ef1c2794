"""API keys, which are stored in Redis or in a file, without their secrets.

The gateway checks keys, and `cellama keys` writes them. This package may import the settings, and the connections and
contract of `tasks`.
"""
