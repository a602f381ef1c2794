"""What the engine is asked: a prompt, and how it goes on. Frozen, and valid once it exists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cellama.config import limits
from cellama.engine.text.reply_reader import ReplyFormat

from .checks import check, check_int, check_length, check_number, is_real
from .errors import InvalidRequest
from .logprobs import TokenLogprob
from .sampling_params import SamplingParams

DEFAULT_PRIORITY = 3
INTERACTIVE_PRIORITY = 5  # the least urgent that is not bulk work

Mode = Literal["generate", "stream"]  # a caller gets all of the text at its end, or piece by piece


@dataclass(frozen=True, slots=True)
class Resumed:
    """Output that a request has already: it goes on after that, as if nothing had happened between."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    mirostat_mu: float | None = None  # what mirostat had learned by then; None = nothing


@dataclass(frozen=True, slots=True)
class Request:
    """One generation: a prompt of token ids and how it goes on. Raises InvalidRequest when it can't be meant."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009  (it is frozen)
    max_tokens: int = 256  # 0: the prompt is read, for those that begin alike later, and nothing is sampled
    n: int = 1  # completions of the one prompt, with seeds counting up
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    timeout_s: float | None = None  # from submission
    priority: int = DEFAULT_PRIORITY  # 0 is the most urgent, 9 the least
    stream: bool = True  # False: no Text events, only Started and Finished
    mode: Mode | None = None  # how its caller gets the text, which telemetry names; None = as `stream` says
    return_tokens: bool = False  # the completion has its `context_tokens`
    cache_prompt: bool = True  # take over what is in the cache, and leave what was computed to others
    cache_scope: str = ""  # only requests of the same scope share prefixes
    adapters: tuple[tuple[str, float], ...] | None = None  # LoRA, name and scale; None = the model's own, () = none
    submitted_at: float | None = None  # time.monotonic(); None = when the engine gets it
    reply: ReplyFormat | None = None  # of a chat: how thinking and tool calls are told from the text
    prediction: tuple[int, ...] = ()  # how the output may go, as its caller guesses: right parts come faster
    only_checks: bool = False  # it ends with the first token that is not as predicted
    resume: tuple[Resumed, ...] = ()  # of the first completions; the seed must be that of the first time
    warnings: tuple[str, ...] = ()  # what its caller asked for and is not enforced

    def __post_init__(self) -> None:
        check(len(self.prompt) > 0, "prompt", self.prompt, "at least one token; give it some text")
        check_number("prompt", len(self.prompt), limits.MAX_PROMPT_TOKENS, "tokens")
        check_int("max_tokens", self.max_tokens, 0, limits.MAX_COUNT)
        check_int("n", self.n, 1, limits.MAX_COMPLETIONS)
        check_int("priority", self.priority, 0, 9)
        if self.sampling.logprobs is not None:
            _check_reported(self.sampling.logprobs, self.n, self.max_tokens)
        check(all(isinstance(s, str) and s for s in self.stop), "stop", self.stop, "strings that are not empty")
        check_number("stop", len(self.stop), limits.MAX_STOPS, "texts")
        for text in self.stop:
            check_length("a text of stop", text, limits.MAX_STOP_CHARS)
        check(isinstance(self.cache_scope, str), "cache_scope", self.cache_scope, "text")
        check_number("prediction", len(self.prediction), limits.MAX_PROMPT_TOKENS, "tokens")
        check_number("resume", len(self.resume), self.n, "outputs")
        self._check_adapters()
        timeout_ok = self.timeout_s is None or (is_real(self.timeout_s) and 0 < self.timeout_s <= limits.MAX_TIMEOUT_S)
        check(timeout_ok, "timeout_s", self.timeout_s, f"seconds above 0 and at most {limits.MAX_TIMEOUT_S}, or None")

    @property
    def called_mode(self) -> Mode:
        """How its caller gets the text."""
        return self.mode or ("stream" if self.stream else "generate")

    @property
    def prefill_only(self) -> bool:
        """True if it ends when its prompt is read."""
        return self.max_tokens == 0

    @property
    def is_interactive(self) -> bool:
        """True if a reader waits for each token; else it is bulk work."""
        return self.priority <= INTERACTIVE_PRIORITY

    def _check_adapters(self) -> None:
        adapters, most = self.adapters or (), limits.MAX_ADAPTER_SCALE
        check_number("adapters", len(adapters), limits.MAX_ADAPTERS, "names")
        for name, scale in adapters:
            check(isinstance(name, str) and bool(name), "an adapter's name", name, "text that is not empty")
            ok = is_real(scale) and abs(scale) <= most
            check(ok, f"the scale of adapter {name!r}", scale, f"a number up to {most:g} either way, for instance 1")
        names = [name for name, _ in adapters]
        check(len(set(names)) == len(names), "adapters", self.adapters, "one scale for each name")


def _check_reported(logprobs: int, n: int, max_tokens: int) -> None:
    count = n * max_tokens * (logprobs + 1)
    if count > limits.MAX_REPORTED:
        raise InvalidRequest(
            f"logprobs {logprobs} for n {n} and max_tokens {max_tokens} make up to {count} entries, and the limit is "
            f"{limits.MAX_REPORTED}; lower one of them"
        )
