"""API keys, which are stored without their secrets, in Redis or in a file.

The gateway checks keys, and `cellama keys` writes them. This package may import the settings, and the connections and
contract of `tasks`.
"""
