"""Create the bundled model by generating its training data, training it, and writing its GGUF file."""
