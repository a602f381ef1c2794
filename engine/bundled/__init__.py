"""The model that comes with the project (see bench/tiny_model/README.md)."""

from pathlib import Path

TINY_PATH = Path(__file__).with_name("tiny.gguf")
