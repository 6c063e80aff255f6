"""Life cycles as data: one enum, one table of legal moves, one place that checks them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

StateT = TypeVar("StateT", bound=Enum)


class IllegalTransitionError(AssertionError):
    """A bug of ours, never the outcome of a bad request or of a peer's fault."""


class Transitions(Generic[StateT]):
    """A table ``state → states that may follow``; states that lead nowhere are terminal."""

    def __init__(self, table: Mapping[StateT, frozenset[StateT]]) -> None:
        self._table = dict(table)

    def can(self, old: StateT, new: StateT) -> bool:
        return new in self._table.get(old, frozenset())

    def check(self, old: StateT, new: StateT) -> StateT:
        """``new`` when the move is legal; raises IllegalTransitionError otherwise."""
        if new not in self._table.get(old, ()):
            raise IllegalTransitionError(f"{type(old).__name__}: {old.name} → {new.name}")
        return new

    def is_terminal(self, state: StateT) -> bool:
        return not self._table.get(state)

    @property
    def table(self) -> Mapping[StateT, frozenset[StateT]]:
        return self._table
