"""Mistakes of a user, one a line; mypy must find each."""

from __future__ import annotations

from cellama.api import AsyncClient, Client

client, awaited = Client(), AsyncClient()
client.generate("tiny", "Hi", max_tokns=5)
client.generate("tiny", "Hi", max_tokens="5")
client.generate("tiny", "Hi").result()["tekst"]
client.chat("tiny", [{"role": "robot", "content": "Hi"}])
client.embed("tiny", "a", encoding="hex")
client.load_model("other", "bundled://tiny", n_paralel=4)
client.batch("in", "out", orderd=True)
awaited.generate("tiny", "Hi", max_tokns=5)
next(client.stream("an id"))["usage"]
