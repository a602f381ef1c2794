"""Match the bytes of a text against a grammar with an automaton. States are built on demand, and all work is limited.

A *stack* is a node of the program together with the frames of the enclosing rules and loops. A *state* is the set of
possible stacks after a text. States are numbered, and a table caches the state that follows each byte, so numpy can
look up whole vocabularies. docs/adr/006-grammars.md explains why llama.cpp's grammars are not used.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from cellama.config import limits
from cellama.engine.errors import GrammarFailed

from .program import END, Edges, Fork, Loop, Program, RuleCall

_UNKNOWN, _DEAD = -2, -1  # entries of the table: not computed yet, and no stack accepts the byte
_MAX_STATES = 4096  # maximum number of states of an automaton, which then drops all of them
_MAX_BYTES = 32 << 20  # maximum estimated size of all states in bytes; above this, they are also dropped
_STACK_BYTES, _FRAME_BYTES, _STEP_BYTES, _NODE_BYTES = 200, 270, 60, 250  # approximate size of each object in bytes
_MAX_UNSORTED = 64  # number of stacks above which a state sorts its stacks by byte class, once


class Frame:
    """The node at which parsing continues after the current rule or loop. Frames that are equal are the same object."""

    __slots__ = ("count", "node", "outer")

    def __init__(self, node: int, count: int, outer: Frame | None) -> None:
        self.node = node
        self.count = count  # completed iterations of a loop, or 0 outside loops
        self.outer = outer


Stack = tuple[int, Frame | None]


class WorkBudget:
    """A request's remaining work, counted in parse steps. A parse step examines one stack.

    All sequences of the request share the budget.
    """

    def __init__(self, remaining: int = limits.GRAMMAR_WORK) -> None:
        self.remaining = remaining

    def spend(self, num_stacks: int) -> None:
        """Deduct one parse step per stack. Raises GrammarFailed if no work remains."""
        self.remaining -= num_stacks
        if self.remaining < 0:
            raise GrammarFailed(
                f"the grammar is too ambiguous: more than {limits.GRAMMAR_WORK} parse steps plus "
                f"{limits.GRAMMAR_WORK_PER_TOKEN} per token were needed; rewrite it so that each text can be parsed in "
                "fewer ways"
            )

    def earn(self) -> None:
        """Increase the budget after a token has been accepted."""
        self.remaining = min(self.remaining + limits.GRAMMAR_WORK_PER_TOKEN, limits.GRAMMAR_WORK)


class Automaton:
    """The states of one program. Only the engine thread may use it."""

    def __init__(self, program: Program) -> None:
        self._nodes = program.nodes
        self._start = program.start
        self.byte_class, self._num_classes = _byte_classes(program)
        self.clear()

    def clear(self) -> None:
        """Drop all states. If sequences still use some of these states, `number_of` assigns new numbers to them."""
        self._frames: dict[tuple[int, int, Frame | None], Frame] = {}
        self.states: list[frozenset[Stack]] = []
        self.accepting: list[bool] = []
        self._numbers: dict[frozenset[Stack], int] = {}
        self._after: dict[frozenset[Stack], int] = {}  # stacks before their forks and calls are expanded → state
        self._sorted: dict[int, dict[int, list[Stack]]] = {}  # states with many stacks: byte class → stacks after it
        self._steps: dict[int, dict[int, int]] = {}  # node → byte class → node
        self._num_stacks = self._num_steps = 0
        self._table = np.full((64, self._num_classes), _UNKNOWN, np.int32)
        self.masks: OrderedDict[int, NDArray[np.uint8]] = OrderedDict()
        self.generation = object()

    @property
    def is_full(self) -> bool:
        """True if the states use too much memory and should be dropped."""
        return len(self.states) > _MAX_STATES or self._state_bytes > _MAX_BYTES

    @property
    def _state_bytes(self) -> int:
        num_bytes = _STACK_BYTES * self._num_stacks + _FRAME_BYTES * len(self._frames) + _STEP_BYTES * self._num_steps
        return num_bytes + self._table.nbytes

    @property
    def num_bytes(self) -> int:
        """The approximate size of the program and its states in bytes. Any thread may read it."""
        return _NODE_BYTES * len(self._nodes) + self._state_bytes

    def start(self, work: WorkBudget) -> int:
        """Return the state before any text."""
        return self._state([(self._start, None)], work)

    def number_of(self, state: frozenset[Stack]) -> int:
        """Return the number of a state. A new state is added first."""
        number = self._numbers.get(state)
        if number is None:
            number = self._numbers[state] = len(self.states)
            self.states.append(state)
            self.accepting.append((END, None) in state)
            self._num_stacks += len(state)
            if number >= len(self._table):
                self._table = np.concatenate([self._table, np.full_like(self._table, _UNKNOWN)])
        return number

    def step(self, state: int, byte_class: int, work: WorkBudget) -> int:
        """Return the state after one byte, or a negative number if the grammar does not allow it."""
        following = int(self._table[state, byte_class])
        if following == _UNKNOWN:
            after = self._stacks_after(state, byte_class, work)
            following = self._state(after, work) if after else _DEAD
            self._table[state, byte_class] = following
        return following

    def _stacks_after(self, state: int, byte_class: int, work: WorkBudget) -> list[Stack]:
        """Return the unexpanded stacks after a byte of this class."""
        stacks = self.states[state]
        if len(stacks) <= _MAX_UNSORTED:
            work.spend(len(stacks))
            return [(to, frame) for node, frame in stacks if (to := self._step_of(node).get(byte_class)) is not None]
        sorted_stacks = self._sorted.get(state)
        if sorted_stacks is None:
            sorted_stacks = self._sorted[state] = {}
            for node, frame in stacks:
                steps = self._step_of(node)
                work.spend(len(steps))
                for each, to in steps.items():
                    sorted_stacks.setdefault(each, []).append((to, frame))
            self._num_stacks += sum(map(len, sorted_stacks.values()))
        return list(sorted_stacks.get(byte_class, ()))

    def walk(self, state: int, data: bytes, work: WorkBudget) -> int:
        """Return the state after these bytes, or a negative number if the grammar does not allow them."""
        for byte in data:
            state = self.step(state, self.byte_class[byte], work)
            if state < 0:
                break
        return state

    def step_all(self, states: NDArray[np.int32], classes: NDArray[np.uint8], work: WorkBudget) -> NDArray[np.int32]:
        """Return the state after each pair of a state and a byte class, like `step` for a single pair."""
        following: NDArray[np.int32] = self._table[states, classes]
        unknown = following == _UNKNOWN
        if unknown.any():
            for pair in np.unique(states[unknown] * 256 + classes[unknown]).tolist():
                self.step(pair >> 8, pair & 255, work)
            following = self._table[states, classes]
        return following

    def _step_of(self, node: int) -> dict[int, int]:
        """Return the nodes that follow a node, keyed by byte class."""
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

    def _state(self, stacks: list[Stack], work: WorkBudget) -> int:
        """Return the state of these stacks, each expanded until it needs a byte or the text may end."""
        key = frozenset(stacks)
        number = self._after.get(key)
        if number is None:
            number = self._after[key] = self.number_of(self._closure(stacks, work))
        return number

    def _closure(self, waiting: list[Stack], work: WorkBudget) -> frozenset[Stack]:
        seen: set[Stack] = set()
        stacks: set[Stack] = set()
        while waiting:
            stack = waiting.pop()
            if stack in seen:
                continue
            seen.add(stack)
            work.spend(1)
            number, frame = stack
            match self._nodes[number]:
                case Edges():
                    stacks.add(stack)
                case Fork(nodes):
                    waiting += [(node, frame) for node in nodes]
                case RuleCall(start, after):
                    # A call at the end of a rule needs no frame, so right recursion is a loop.
                    waiting.append((start, frame if after == END else self._frame(after, 0, frame)))
                case Loop() as loop:
                    waiting += self._iterations(number, loop, 0, frame)
                case None if frame is None:
                    stacks.add(stack)
                case None:
                    node = self._nodes[frame.node]
                    in_loop = isinstance(node, Loop) and frame.count > 0
                    if in_loop:
                        assert isinstance(node, Loop)
                        waiting += self._iterations(frame.node, node, frame.count, frame.outer)
                    else:
                        waiting.append((frame.node, frame.outer))
            if len(stacks) > limits.MAX_GRAMMAR_STACKS:
                raise GrammarFailed(
                    f"the grammar is too ambiguous: more than {limits.MAX_GRAMMAR_STACKS} parse stacks at a position; "
                    "rewrite it so that each text can be parsed in fewer ways"
                )
        return frozenset(stacks)

    def _iterations(self, number: int, loop: Loop, done: int, outer: Frame | None) -> list[Stack]:
        """Return the stacks after `done` iterations of a loop. The loop then either ends or starts another iteration.

        Iteration counts are capped once they no longer make a difference, so that equivalent stacks are equal.
        """
        stacks: list[Stack] = [(loop.after, outer)] if done >= loop.min_count else []
        if loop.max_count is None:
            done = min(done, max(loop.min_count - 1, 0))
        if loop.max_count is None or done < loop.max_count:
            stacks.append((loop.body, self._frame(number, done + 1, outer)))
        return stacks

    def _frame(self, node: int, count: int, outer: Frame | None) -> Frame:
        key = (node, count, outer)
        frame = self._frames.get(key)
        if frame is None:
            frame = self._frames[key] = Frame(node, count, outer)
        return frame


def _byte_classes(program: Program) -> tuple[list[int], int]:
    """Return the class of each byte and the number of classes.

    No edge distinguishes between bytes of the same class.
    """
    is_border = np.zeros(257, np.bool_)
    for node in program.nodes:
        if isinstance(node, Edges):
            for low, high, _ in node.ranges:
                is_border[low] = is_border[high + 1] = True
    classes = np.cumsum(is_border[:256]) - int(is_border[0])
    return classes.tolist(), int(classes[-1]) + 1
