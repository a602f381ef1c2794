"""Other projects' programs use the tokenizer of the model that they measure."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from cellama.bench.peers.offline_tools import TOKENIZER, OfflineTool
from cellama.engine.bundled import TINY_PATH
from cellama.engine.llama.model import LlamaModel


def test_offline_tools_find_the_tokenizer_of_the_model(tmp_path: Path) -> None:
    OfflineTool(tmp_path / "environment", tmp_path, TINY_PATH)
    [file] = tmp_path.glob(f"huggingface/hub/models--{TOKENIZER.replace('/', '--')}/snapshots/*/tokenizer.json")
    text = "The judges came on Monday; they counted 1,234 tokens."
    model = LlamaModel(TINY_PATH, vocab_only=True)
    try:
        assert Tokenizer.from_file(str(file)).encode(text).ids == model.tokenize(text, add_special=False)
    finally:
        model.close()
