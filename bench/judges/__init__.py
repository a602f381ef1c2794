"""Other projects' load generators, unmodified, measure cellama's gateway and llama-server (`make judge`)."""
