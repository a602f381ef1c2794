"""What producers, workers and readers agree on: importable without llama.cpp and without a worker."""
