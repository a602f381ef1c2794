"""Several models or workers on one machine: memory, loads, embeddings, cores."""
