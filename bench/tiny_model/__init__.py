"""How the bundled model is made: its text, its training, its GGUF file."""
