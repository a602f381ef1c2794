"""KV states that outlive their slot: what a folder of them saves, and what it costs (docs/adr/014-kept-states.md)."""
