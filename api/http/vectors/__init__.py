"""POST /v1/embeddings, and reranking as Jina's and Cohere's clients ask for it.

May use: the modules of `http`, `openai`.
"""

from .endpoints import ROUTES

__all__ = ["ROUTES"]
