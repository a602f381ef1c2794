"""POST /tokenize and /detokenize, in the forms of llama-server and of vLLM.

May use: the modules of `http`.
"""

from .endpoints import ROUTES

__all__ = ["ROUTES"]
