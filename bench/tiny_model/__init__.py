"""Create the bundled model: its training data, its training, and its GGUF file."""
