"""One engine, without the queue: its rate, its latency, its cache, its strategies."""
