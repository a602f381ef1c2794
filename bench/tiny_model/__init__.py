"""Create the bundled model: write its training data, train it, and write its GGUF file."""
