"""Functions put in the place of others, and taken out again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["Patches"]

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class Patches:
    """What was replaced, in order."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []

    def wrap(self, owner: Any, name: str, make: Wrap) -> bool:
        """Replace ``owner.name`` (a module's or a class's own) by ``make`` of it; False: there is none."""
        act = vars(owner).get(name)
        if act is None:
            return False
        self.put(owner, name, functools.wraps(act)(make(act)))
        return True

    def put(self, owner: Any, name: str, value: Any) -> None:
        self._done.append((owner, name, vars(owner)[name], value))
        setattr(owner, name, value)

    def remove(self) -> None:
        """Put everything back. What somebody has wrapped meanwhile stays: ours only passes on then."""
        while self._done:
            owner, name, before, ours = self._done.pop()
            if vars(owner).get(name) is ours:
                setattr(owner, name, before)
