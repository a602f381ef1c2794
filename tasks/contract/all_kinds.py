"""All kinds of jobs, and the union of their results.

.ci/typed_tasks.py writes this file from the modules in tasks/contract/kinds. Do not edit it; run the script.
"""

from __future__ import annotations

from .kinds import Kind
from .kinds.chat import CHAT, ChatResult
from .kinds.chunk import CHUNK, ChunkResult
from .kinds.embed import EMBED, EmbedResult
from .kinds.generate import GENERATE, GenerateResult
from .kinds.prefill import PREFILL, PrefillResult
from .kinds.rerank import RERANK, RerankResult
from .kinds.tokens import APPLY_CHAT_TEMPLATE, DETOKENIZE, TOKENIZE, DetokenizeResult, TemplateResult, TokenizeResult

KINDS: dict[str, Kind] = {
    kind.task: kind
    for kind in (CHAT, CHUNK, EMBED, GENERATE, PREFILL, RERANK, TOKENIZE, DETOKENIZE, APPLY_CHAT_TEMPLATE)
}
Result = (
    ChatResult
    | ChunkResult
    | EmbedResult
    | GenerateResult
    | PrefillResult
    | RerankResult
    | TokenizeResult
    | DetokenizeResult
    | TemplateResult
)
