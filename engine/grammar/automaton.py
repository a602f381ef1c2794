"""What may come next by a grammar: an automaton over bytes, made as it is needed, with a bound on all work.

A *state* is the set of ways in which the text so far can go on; a way is a node of the program and the frames of the
rules and loops around it. States are numbered, and what a byte leads to is kept in a table, so that whole vocabularies
are looked up by numpy. docs/adr/006-grammars.md says why this is not llama.cpp's grammar.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from cellama.config import limits
from cellama.engine.errors import GrammarFailed

from .program import END, Edges, Fork, Loop, Program, RuleCall

_UNKNOWN, _DEAD = -2, -1  # in the table: not looked at yet; no way goes on
_MAX_STATES = 4096  # of an automaton, and ...
_MAX_BYTES = 32 << 20  # ... what all of them take, before it forgets them
_WAY_BYTES, _FRAME_BYTES, _STEP_BYTES, _NODE_BYTES = 200, 270, 60, 250  # about what each of them takes
_MANY = 64  # ways of a state


class Frame:
    """Where a way goes on when the present rule or loop ends. One object for equal ones of an automaton."""

    __slots__ = ("count", "node", "outer")

    def __init__(self, node: int, count: int, outer: Frame | None) -> None:
        self.node = node
        self.count = count  # rounds of a loop that are over
        self.outer = outer


Way = tuple[int, Frame | None]


class WorkBudget:
    """What is left of a request's work, in ways looked at. Its sequences share it."""

    def __init__(self, left: int = limits.GRAMMAR_WORK) -> None:
        self.left = left

    def spend(self, ways: int) -> None:
        self.left -= ways
        if self.left < 0:
            raise GrammarFailed(
                f"the grammar is too ambiguous: more than {limits.GRAMMAR_WORK} ways to go on were looked at, and "
                f"{limits.GRAMMAR_WORK_PER_TOKEN} more per token; write it so that each text can be read in few ways"
            )

    def earn(self) -> None:
        """A token was accepted."""
        self.left = min(self.left + limits.GRAMMAR_WORK_PER_TOKEN, limits.GRAMMAR_WORK)


class Automaton:
    """The states of one program. Engine thread only."""

    def __init__(self, program: Program) -> None:
        self._nodes = program.nodes
        self._start = program.start
        self.byte_class, self._num_classes = _byte_classes(program)
        self.forget()

    def forget(self) -> None:
        """Drops all states; those that a sequence is in are numbered anew by `number_of`."""
        self._frames: dict[tuple[int, int, Frame | None], Frame] = {}
        self.states: list[frozenset[Way]] = []
        self.accepting: list[bool] = []
        self._numbers: dict[frozenset[Way], int] = {}
        self._after: dict[frozenset[Way], int] = {}  # ways before their forks and calls → state
        self._sorted: dict[int, dict[int, list[Way]]] = {}  # states with many ways: class of byte → ways after it
        self._steps: dict[int, dict[int, int]] = {}  # node → class of byte → node
        self._num_ways = self._num_steps = 0
        self._table = np.full((64, self._num_classes), _UNKNOWN, np.int32)
        self.masks: OrderedDict[int, NDArray[np.uint8]] = OrderedDict()
        self.generation = object()

    @property
    def is_full(self) -> bool:
        return len(self.states) > _MAX_STATES or self._state_bytes > _MAX_BYTES

    @property
    def _state_bytes(self) -> int:
        noted = _WAY_BYTES * self._num_ways + _FRAME_BYTES * len(self._frames) + _STEP_BYTES * self._num_steps
        return noted + self._table.nbytes

    @property
    def num_bytes(self) -> int:
        """About what program and states take. Any thread."""
        return _NODE_BYTES * len(self._nodes) + self._state_bytes

    def start(self, work: WorkBudget) -> int:
        """The state before any text."""
        return self._state([(self._start, None)], work)

    def number_of(self, state: frozenset[Way]) -> int:
        number = self._numbers.get(state)
        if number is None:
            number = self._numbers[state] = len(self.states)
            self.states.append(state)
            self.accepting.append((END, None) in state)
            self._num_ways += len(state)
            if number >= len(self._table):
                self._table = np.concatenate([self._table, np.full_like(self._table, _UNKNOWN)])
        return number

    def step(self, state: int, byte_class: int, work: WorkBudget) -> int:
        """The state after one byte, or a negative number."""
        following = int(self._table[state, byte_class])
        if following == _UNKNOWN:
            after = self._ways_after(state, byte_class, work)
            following = self._state(after, work) if after else _DEAD
            self._table[state, byte_class] = following
        return following

    def _ways_after(self, state: int, byte_class: int, work: WorkBudget) -> list[Way]:
        """Where a class of bytes leads the ways of a state; many ways are sorted by class, once."""
        ways = self.states[state]
        if len(ways) <= _MANY:
            work.spend(len(ways))
            return [(to, frame) for node, frame in ways if (to := self._step_of(node).get(byte_class)) is not None]
        sorted_ways = self._sorted.get(state)
        if sorted_ways is None:
            sorted_ways = self._sorted[state] = {}
            for node, frame in ways:
                steps = self._step_of(node)
                work.spend(len(steps))
                for each, to in steps.items():
                    sorted_ways.setdefault(each, []).append((to, frame))
            self._num_ways += sum(map(len, sorted_ways.values()))
        return list(sorted_ways.get(byte_class, ()))

    def walk(self, state: int, data: bytes, work: WorkBudget) -> int:
        """The state after these bytes, or a negative number."""
        for byte in data:
            state = self.step(state, self.byte_class[byte], work)
            if state < 0:
                break
        return state

    def step_all(self, states: NDArray[np.int32], classes: NDArray[np.uint8], work: WorkBudget) -> NDArray[np.int32]:
        """As `step`, of many at once."""
        following: NDArray[np.int32] = self._table[states, classes]
        unknown = following == _UNKNOWN
        if unknown.any():
            for pair in np.unique(states[unknown] * 256 + classes[unknown]).tolist():
                self.step(pair >> 8, pair & 255, work)
            following = self._table[states, classes]
        return following

    def _step_of(self, node: int) -> dict[int, int]:
        """Which node each class of bytes leads to."""
        steps = self._steps.get(node)
        if steps is None:
            edges, steps = self._nodes[node], {}
            if isinstance(edges, Edges):
                for low, high, to in edges.ranges:
                    for byte_class in range(self.byte_class[low], self.byte_class[high] + 1):
                        steps[byte_class] = to
            self._steps[node] = steps
            self._num_steps += len(steps)
        return steps

    def _state(self, ways: list[Way], work: WorkBudget) -> int:
        """The state of these ways, walked on to where a byte is needed or the text may end."""
        key = frozenset(ways)
        number = self._after.get(key)
        if number is None:
            number = self._after[key] = self.number_of(self._closure(ways, work))
        return number

    def _closure(self, waiting: list[Way], work: WorkBudget) -> frozenset[Way]:
        seen: set[Way] = set()
        ways: set[Way] = set()
        while waiting:
            way = waiting.pop()
            if way in seen:
                continue
            seen.add(way)
            work.spend(1)
            number, frame = way
            match self._nodes[number]:
                case Edges():
                    ways.add(way)
                case Fork(nodes):
                    waiting += [(node, frame) for node in nodes]
                case RuleCall(start, after):
                    # A call at the end of a rule needs no frame: recursion to the right is a loop.
                    waiting.append((start, frame if after == END else self._frame(after, 0, frame)))
                case Loop() as loop:
                    waiting += self._rounds(number, loop, 0, frame)
                case None if frame is None:
                    ways.add(way)
                case None:
                    node = self._nodes[frame.node]
                    in_loop = isinstance(node, Loop) and frame.count > 0
                    if in_loop:
                        assert isinstance(node, Loop)
                        waiting += self._rounds(frame.node, node, frame.count, frame.outer)
                    else:
                        waiting.append((frame.node, frame.outer))
            if len(ways) > limits.MAX_GRAMMAR_STACKS:
                raise GrammarFailed(
                    f"the grammar is too ambiguous: more than {limits.MAX_GRAMMAR_STACKS} ways to go on from here; "
                    "write it so that each text can be read in few ways"
                )
        return frozenset(ways)

    def _rounds(self, number: int, loop: Loop, done: int, outer: Frame | None) -> list[Way]:
        """The ways after `done` rounds of a loop: on, or another round. Counts end where they no longer matter."""
        ways: list[Way] = [(loop.after, outer)] if done >= loop.least else []
        if loop.most is None:
            done = min(done, max(loop.least - 1, 0))
        if loop.most is None or done < loop.most:
            ways.append((loop.body, self._frame(number, done + 1, outer)))
        return ways

    def _frame(self, node: int, count: int, outer: Frame | None) -> Frame:
        key = (node, count, outer)
        frame = self._frames.get(key)
        if frame is None:
            frame = self._frames[key] = Frame(node, count, outer)
        return frame


def _byte_classes(program: Program) -> tuple[list[int], int]:
    """Bytes that no edge tells apart are of one class; classes are in the order of their bytes."""
    begins = np.zeros(257, np.bool_)
    for node in program.nodes:
        if isinstance(node, Edges):
            for low, high, _ in node.ranges:
                begins[low] = begins[high + 1] = True
    classes = np.cumsum(begins[:256]) - int(begins[0])
    return classes.tolist(), int(classes[-1]) + 1
