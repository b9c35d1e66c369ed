"""What is replaced in Megatron, as data: which name of which module, for which versions, and by what.

A patch is applied right after its module was imported, before any other module can bind the
original. A name that is gone, or that no longer takes the arguments which its stand-in hands on,
stops the run by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .mesh import Refused

__all__ = ["Patch", "missing", "version_of", "when_imported"]


@dataclass(frozen=True, slots=True)
class Patch:
    """One replaced name."""

    module: str
    name: str
    """Within the module, with dots."""
    parameters: tuple[str, ...]
    """What the original must take by name; ``*`` is not looked at."""
    why: str
    make: Callable[[Any], Any]
    """The stand-in, given the original."""
    since: tuple[int, ...] = (0,)
    before: tuple[int, ...] = (999,)
    optional: bool = False
    """The module may be absent: megatron.training is not part of megatron.core."""

    def concerns(self, version: tuple[int, ...]) -> bool:
        return self.since <= version < self.before


def version_of(core: Any) -> tuple[int, ...]:
    """Numbers of megatron.core's version: (0, 16, 1)."""
    text = str(core.__version__)
    return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())


def missing(patch: Patch, module: Any) -> str:
    """Why the patch cannot be applied to its module; empty: it can."""
    holder, _, name = patch.name.rpartition(".")
    owner = getattr(module, holder, None) if holder else module
    original = getattr(owner, name, None) if owner is not None else None
    if original is None:
        return f"{patch.module} has no {patch.name} ({patch.why})"
    taken = inspect.signature(original).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
        return ""
    if lost := [one for one in patch.parameters if one not in taken]:
        return f"{patch.module}.{patch.name} no longer takes {', '.join(lost)} ({patch.why})"
    return ""


def apply(patch: Patch, module: ModuleType) -> None:
    """Put the stand-in into the module; Refused where the original is not what it was."""
    if not patch.concerns(version_of(importlib.import_module("megatron.core.package_info"))):
        return
    if reason := missing(patch, module):
        raise Refused(f"this Megatron is not one that the runtime knows: {reason}")
    holder, _, name = patch.name.rpartition(".")
    owner = getattr(module, holder) if holder else module
    setattr(owner, name, patch.make(getattr(owner, name)))


def arrange(patches: Iterable[Patch]) -> None:
    """Apply every patch when its module is imported."""
    for patch in patches:
        when_imported(patch.module, lambda module, patch=patch: apply(patch, module))  # type: ignore[misc]


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
