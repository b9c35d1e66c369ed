"""Runs a function right after a module was imported."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["when_imported"]

_waiting: dict[str, list[Callable[[ModuleType], None]]] = {}


class _Finder:
    """Finds a module as the others do, and wraps the execution of those that somebody waits for."""

    busy = ""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _waiting or self.busy == name:
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
            execute(module)
            for act in _waiting.pop(name, []):
                act(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def when_imported(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call ``act(module)`` when ``name`` has been imported: at once if it was already."""
    if name in sys.modules:
        act(sys.modules[name])
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _waiting.setdefault(name, []).append(act)
