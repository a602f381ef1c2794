"""A backend that fails where a test requests it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cellama.engine.backend import AdapterSet, Chunk
from cellama.engine.fake import FakeBackend, FakeCheckpoint, FakeSampler, FakeState, FakeVocabulary

Fault = Callable[[str, Any], None]
POISON = ord("!")


class FaultyVocabulary(FakeVocabulary):
    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def token_bytes(self, token: int) -> bytes:
        self._fault("token_bytes", token)
        return super().token_bytes(token)


@dataclass
class FaultySampler(FakeSampler):
    fault: Fault = lambda place, what: None
    poisoned: bool = False

    def sample(self, slot: int, forced: int | None = None, row: int = 0) -> tuple[int, None]:
        self.fault("sample", self.poisoned)
        return super().sample(slot, forced, row)[0], None


@dataclass
class FaultyBackend(FakeBackend):
    """A backend whose calls fail if `fault` raises. It receives the call's name, and whether the call is poisoned."""

    fault: Fault = field(default=lambda place, what: None)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.vocabulary = FaultyVocabulary(lambda place, what: self.fault(place, what))

    def decode(self, chunks: Sequence[Chunk], adapters: AdapterSet = ()) -> None:
        self.fault("decode", any(POISON in chunk.tokens for chunk in chunks))
        super().decode(chunks, adapters)

    def new_sampler(self, params: Any, seed: int, history: Sequence[int], **options: Any) -> FaultySampler:
        self.fault("new_sampler", POISON in history)
        plain = super().new_sampler(params, seed, history, **options)
        own = FaultySampler(self, plain.seed, plain.min_tokens, plain.num_sampled)
        own.fault, own.poisoned = lambda place, what: self.fault(place, what), POISON in history
        return own

    def trim(self, slot: int, num_tokens: int, checkpoint: FakeCheckpoint | None = None) -> bool:
        self.fault("trim", None)
        return super().trim(slot, num_tokens, checkpoint)

    def state_bytes(self, slot: int) -> int:
        self.fault("state_bytes", None)
        return super().state_bytes(slot)

    def save(self, slot: int) -> FakeState:
        self.fault("save", None)
        return super().save(slot)

    def copy(self, source: int, target: int, num_tokens: int, checkpoint: FakeCheckpoint | None = None) -> bool:
        self.fault("copy", None)
        return super().copy(source, target, num_tokens, checkpoint)

    def restore(self, slot: int, data: FakeState, num_tokens: int, checkpoint: FakeCheckpoint | None = None) -> bool:
        self.fault("restore", None)
        return super().restore(slot, data, num_tokens, checkpoint)

    def checkpoint(self, slot: int) -> FakeCheckpoint:
        self.fault("checkpoint", None)
        return super().checkpoint(slot)


def at(place: str) -> Fault:
    def fault(here: str, poisoned: Any) -> None:
        if here == place and poisoned is True:
            raise OverflowError("nobody foresaw this")

    return fault
