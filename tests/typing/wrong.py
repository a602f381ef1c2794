"""Mistakes of a user, one a line; mypy must find each."""

from __future__ import annotations

from cellama.api import AsyncClient, Client
from cellama.tasks import embed, generate

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
client.models()[0]["statuss"]
client.workers()[0].models[0]["engine"]["slots_total"]
generate.delay("tiny", "Hi", max_tokns=5)
generate.delay("tiny")
generate.apply_async(("tiny", "Hi"), {"max_tokns": 5})
generate.apply_async(("tiny", "Hi"), countdwn=5)
embed.delay("tiny", "a").get()["text"]
