"""Runs a function right before or after a module is executed for the first time."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["before_import", "when_imported"]

Act = Callable[[ModuleType], None]

_before: dict[str, list[Act]] = {}
_after: dict[str, list[Act]] = {}


class _Finder:
    """Finds a module as the others do, and wraps the execution of those that somebody waits for."""

    busy = ""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if (name not in _before and name not in _after) or self.busy == name:
            return None
        self.busy = name
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.busy = ""
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            for act in _before.pop(name, []):
                act(module)
            execute(module)
            for act in _after.pop(name, []):
                act(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def when_imported(name: str, act: Act) -> None:
    """Call ``act(module)`` when ``name`` has been imported: at once if it was already."""
    _wait(_after, name, act)


def before_import(name: str, act: Act) -> None:
    """Call ``act(module)`` before the code of ``name`` runs; at once if it has run already."""
    _wait(_before, name, act)


def _wait(waiting: dict[str, list[Act]], name: str, act: Act) -> None:
    if name in sys.modules:
        act(sys.modules[name])
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    waiting.setdefault(name, []).append(act)
