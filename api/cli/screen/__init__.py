"""One screen of what goes on, for people who watch.

May use: the modules of `cli`.
"""
