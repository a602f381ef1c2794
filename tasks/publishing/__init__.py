"""From what an engine tells to what a job's stream and result say.

May use: `contract`, `connection`, `state`, `broker`, and the engine. In workers only.
"""
