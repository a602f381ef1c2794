"""The model that is bundled with cellama, and a LoRA adapter for this model (see bench/tiny_model/README.md)."""

from pathlib import Path

TINY_PATH = Path(__file__).with_name("tiny.gguf")
PIRATE_PATH = Path(__file__).with_name("pirate.gguf")
