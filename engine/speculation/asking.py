"""When a draft model is asked, and what that takes: unlike texts it is not for nothing. Pure."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from cellama.engine.backend import DecodeError
from cellama.engine.scheduling.sequence import Sequence

from .draft_model import ANY_MARK, NAME, DraftModel
from .gate import Candidate
from .odds import Odds
from .sources import Draft

log = logging.getLogger(__name__)

SURE_ODDS = 0.8  # of the first token that texts say, beside which no model is asked
REST = 16  # steps for which it is not thought of after it did not pay
MAX_FAILURES = 3  # one after another
WEIGHT = 0.1  # of a new value in a running mean


class Asking:
    """Weighs for the gate what a draft model could bring, before it is asked. Engine thread only.

    What it reads of a prompt is a debt: a sequence pays it with the tokens that it generates, and the rest at its end.
    """

    def __init__(self, model: DraftModel, odds: Odds) -> None:
        """`odds` are those in general."""
        self._model: DraftModel | None = model
        self._odds = odds
        self._rest = 0  # steps for which it is not thought of
        self._num_failures = 0
        self._num_usual = 0.0  # tokens of an output
        self._owed_s: dict[Sequence, float] = {}

    def candidate(self, sequence: Sequence, slot: int, said: Seq[float], odds: Odds, most: int) -> Candidate:
        """A slot about which texts say something of these odds: with what the model could say, where that is more."""
        likely = odds.of(NAME, ANY_MARK)
        if self._model is None or self._rest > 0 or most < 1 or (said and said[0] >= min(likely, SURE_ODDS)):
            return Candidate(slot, said)
        return Candidate(slot, [likely] * most, True, self._model.reading_s(sequence), self._num_left(sequence))

    def seconds(self, num_slots: int, length: int) -> float:
        """What drafts of so many tokens for so many slots take."""
        return 0.0 if self._model is None else self._model.seconds(num_slots, length)

    def begin_step(self) -> None:
        """Drafts are weighed again."""
        self._rest -= 1

    def refuse(self, refused: Seq[Odds]) -> None:
        """It does not pay for these sequences, and gets another chance later: with a little more trust each time."""
        self._rest = REST
        if self._model is not None:
            self._model.pardon()
        for odds in (self._odds, *refused):
            odds.fade(NAME, ANY_MARK)

    def make(self, asked: Mapping[Sequence, Odds], most: int) -> tuple[dict[Sequence, Draft], float]:
        """Its drafts for these sequences, and the seconds that they took; who has to be read first may have none."""
        if self._model is None:
            return {}, 0.0
        try:
            made = self._model.draft(asked, most)
        except DecodeError as error:
            self._num_failures += 1
            is_over = self._num_failures >= MAX_FAILURES
            self._model = None if is_over else self._model
            log.warning("the draft model can't guess (%s)%s", error, "; it is not asked any more" if is_over else "")
            return {}, 0.0
        self._num_failures = 0
        for sequence, seconds in made.reading_s.items():
            self._owed_s[sequence] = self._owed_s.get(sequence, 0.0) + seconds
        return made.drafts, made.seconds

    def learn(self, sequence: Sequence, odds: Odds, draft: Draft, tokens: Seq[int]) -> float:
        """The sequence went on with these tokens; the seconds of its debt that these pay."""
        if draft.source == NAME:
            odds.compare(draft._replace(marks=[ANY_MARK] * len(draft.tokens)), tokens)
        owed_s = self._owed_s.get(sequence, 0.0)
        if not owed_s or not tokens:
            return 0.0
        paid_s = owed_s * len(tokens) / (len(tokens) + self._num_left(sequence))
        self._owed_s[sequence] = owed_s - paid_s
        return paid_s

    def end(self, sequence: Sequence) -> float:
        """The sequence has ended; the seconds that it still owed."""
        if sequence.num_output:
            self._num_usual += (sequence.num_output - self._num_usual) * (WEIGHT if self._num_usual else 1.0)
        if self._model is not None:
            self._model.end(sequence)
        return self._owed_s.pop(sequence, 0.0)

    def forget_idle(self) -> None:
        """The model holds nothing of sequences that have ended."""
        if self._model is not None:
            self._model.forget_idle()

    def _num_left(self, sequence: Sequence) -> float:
        """Tokens that a sequence is still to generate: as many as usual, or as it has done, if it is longer."""
        likely = max(1.0, sequence.num_output, self._num_usual - sequence.num_output)
        return max(1.0, min(likely, sequence.request.max_tokens - sequence.num_output))
