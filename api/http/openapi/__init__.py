"""Describe the gateway as an OpenAPI 3.1 document, which is generated from the gateway's own tables and types.

This package may import all groups of endpoints except the console, and the tables of `api.openai` and `api.anthropic`.
"""

from .document import api_routes, gateway_document
from .endpoints import ROUTES, document_text

__all__ = ["ROUTES", "api_routes", "document_text", "gateway_document"]
