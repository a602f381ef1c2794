"""How a query and a document become one text for a reranker: as its tokenizer, or its own template, says."""

from __future__ import annotations

import re
from collections.abc import Mapping

import llama_cpp.llama_cpp as lib

from cellama.engine.text.markup import from_caller

from .model import LlamaModel


class PairFormat:
    """Joins queries and documents. Safe from any thread.

    With a template (tokenizer.chat_template.rerank: `{query}` and `{document}` in a text) as llama-server does. Else
    [begin] query [end] [separator] document [end], each special token only if the vocabulary adds it to texts; where
    that is separators alone (WordPiece), one follows the document, too, as the tokenizer puts it after every text.
    """

    def __init__(self, model: LlamaModel, *, control_tokens_in_text: bool = False) -> None:
        """With `control_tokens_in_text` a template's query and document may write control tokens, too."""
        self._model = model
        self._control_tokens_in_text = control_tokens_in_text
        vocab = model.vocab
        template = lib.llama_model_chat_template(model.pointer, b"rerank")
        self._template = template.decode(errors="replace") if template else None
        separator = lib.llama_vocab_sep(vocab)
        end = lib.llama_vocab_eos(vocab)
        adds_end, adds_separator = lib.llama_vocab_get_add_eos(vocab), lib.llama_vocab_get_add_sep(vocab)
        self._begin = [lib.llama_vocab_bos(vocab)] if lib.llama_vocab_get_add_bos(vocab) else []
        ending = [end if end >= 0 else separator] if adds_end else []
        separating = [separator] if adds_separator else []
        self._middle = ending + separating
        self._end = ending or separating

    def join(self, query: str, document: str) -> list[int]:
        """The tokens of a pair."""
        if self._template is not None:
            return self._filled(self._template, {"{query}": query, "{document}": document})
        return [*self._head(query), *self._plain(document), *self._end]

    def join_cut(self, query: str, document: str, max_tokens: int) -> list[int]:
        """The tokens of a pair whose document is cut to what `max_tokens` leave for it; more if they leave nothing."""
        if self._template is None:
            head, tail = self._head(query), self._end
        else:
            head, _, tail = (self._filled(part, {"{query}": query}) for part in self._template.partition("{document}"))
        room = max(0, max_tokens - len(head) - len(tail))
        return [*head, *self._plain(document)[:room], *tail]

    def _head(self, query: str) -> list[int]:
        return [*self._begin, *self._plain(query), *self._middle]

    def _filled(self, template: str, texts: Mapping[str, str]) -> list[int]:
        """The tokens of a template with these texts in it, whose control tokens are the template's own."""
        parts = re.split("({query}|{document})", template)
        text = "".join(texts.get(part, part) for part in parts)
        marked = text
        if not self._control_tokens_in_text:
            marked = "".join(from_caller(texts[part]) if part in texts else part for part in parts)
        return self._model.tokenize_marked(text, marked)

    def _plain(self, text: str) -> list[int]:
        return self._model.tokenize(text, add_special=False)
