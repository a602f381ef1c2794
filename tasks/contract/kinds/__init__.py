"""The kinds of jobs: a module for each has its payload, its result and its row.

`contract/all_kinds.py` collects them.
"""
