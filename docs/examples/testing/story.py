"""The code under test, a function that uses a model."""

from cellama.api import Client


def title_of(client: Client, animal: str) -> str:
    """Return the first four words of a story."""
    result = client.generate("tiny", f"Once upon a time, there was a little {animal}", max_tokens=20, temperature=0)
    return " ".join(result.result(timeout=60)["text"].split()[:4])
