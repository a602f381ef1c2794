"""What the engine asks of the operating system: cores, control groups, threads, processes that may end.

Also who looks whether threads still move. May use: nothing of ours.
"""
