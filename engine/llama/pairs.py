"""How a query and a document become one text for a reranker: as its tokenizer, or its own template, says."""

from __future__ import annotations

import llama_cpp.llama_cpp as lib

from .model import LlamaModel


class PairFormat:
    """Joins queries and documents. Safe from any thread.

    With a template (tokenizer.chat_template.rerank: `{query}` and `{document}` in a text) as llama-server does. Else
    [begin] query [end] [separator] document [end], each special token only if the vocabulary adds it to texts; where
    that is separators alone (WordPiece), one follows the document, too, as the tokenizer puts it after every text.
    """

    def __init__(self, model: LlamaModel) -> None:
        self._model = model
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
            head, tail = self._around(query)
            return self._model.tokenize(head + document + tail, add_special=False, parse_special=True)
        return [*self._head(query), *self._plain(document), *self._end]

    def join_cut(self, query: str, document: str, max_tokens: int) -> list[int]:
        """The tokens of a pair whose document is cut to what `max_tokens` leave for it; more if they leave nothing."""
        if self._template is None:
            head, tail = self._head(query), self._end
        else:
            head, tail = (self._special(text) for text in self._around(query))
        room = max(0, max_tokens - len(head) - len(tail))
        return [*head, *self._plain(document)[:room], *tail]

    def _head(self, query: str) -> list[int]:
        return [*self._begin, *self._plain(query), *self._middle]

    def _around(self, query: str) -> tuple[str, str]:
        """What the template puts before and after the document. It is split first: a query may read `{document}`."""
        head, _, tail = (self._template or "").partition("{document}")
        return head.replace("{query}", query), tail.replace("{query}", query)

    def _plain(self, text: str) -> list[int]:
        return self._model.tokenize(text, add_special=False)

    def _special(self, text: str) -> list[int]:
        return self._model.tokenize(text, add_special=False, parse_special=True)
