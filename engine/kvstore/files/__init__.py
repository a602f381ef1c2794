"""Files of states and the folder that processes share: the format, names, quota, locks.

May use: keys and states of `kvstore`. No threads here.
"""
