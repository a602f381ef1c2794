"""What we are compared with: llama.cpp's own programs, llama-cpp-python's server, the task that one would write first.
And the Prometheus that is asked what it has of us.

May use: `harness`.
"""
