"""YAML as people write it, read strictly: one document, no repeated keys, few aliases, and every complaint in one line.

PyYAML alone keeps the last of two equal keys in silence, unfolds aliases without limit and recurses as deep as the file
says; a cluster file that does any of these is a mistake or an attack, and is refused with its line and column.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from pathlib import Path
from typing import Any, Final

import yaml

from hapmoe.errors import InputError

__all__ = ["parse_yaml", "read_yaml"]

MAX_BYTES: Final = 1 << 20
"""A cluster of ten thousand named hosts takes a fifth of it."""
MAX_ALIASES: Final = 16
"""Enough to share a network between pools; too few to unfold into gigabytes."""
MAX_DEPTH: Final = 20
"""The deepest field of any file of ours is at 6."""

_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _StrictLoader(_SafeLoader):  # type: ignore[misc]  # the base is chosen at run time
    """The safe loader, except that a repeated key is an error."""

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Hashable, Any]:
        if isinstance(node, yaml.MappingNode):
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in seen:
                        raise yaml.constructor.ConstructorError(
                            None, None, f"the key {key.value!r} is given twice", key.start_mark
                        )
                    seen.add(key.value)
        return super().construct_mapping(node, deep=deep)  # type: ignore[no-any-return]


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """The content of a YAML file. Raises ``InputError`` for whatever is wrong with path, bytes or syntax."""
    file, where = Path(path), os.fspath(path)
    where = where if len(where) <= 200 else f"...{where[-200:]}"
    if "\0" in where or "\n" in where:
        raise InputError(f"{where[:40]!r} is not a file name", hint="give the path of a YAML file")
    try:
        if file.is_dir():
            raise InputError("is a directory", where=where, hint="give the YAML file itself")
        size = file.stat().st_size
        if size > MAX_BYTES:
            raise InputError(f"has {size:,} bytes, more than the {MAX_BYTES:,} of any sensible file here", where=where)
        data = file.read_bytes()
    except FileNotFoundError:
        raise InputError("no such file", where=where) from None
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror or error})", where=where) from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"is not text (byte {error.start} is not UTF-8)", where=where) from None
    return parse_yaml(text, where)


def parse_yaml(text: str, where: str) -> Any:
    """The content of YAML ``text``; ``where`` names its origin in errors. Empty text is refused."""
    try:
        _check_shape(text, where)
        content = yaml.load(text, Loader=_StrictLoader)  # a subclass of the safe loader
    except yaml.MarkedYAMLError as error:
        what = ", ".join(part for part in (error.context, error.problem) if part) or "is not YAML"
        place = _place(error.problem_mark or error.context_mark)
        raise InputError(" ".join(what.split()), where=f"{where}{place}", hint=_hint(what)) from None
    except yaml.YAMLError as error:  # characters that YAML does not allow
        raise InputError(f"is not YAML text ({' '.join(str(error).split())})", where=where) from None
    except (ValueError, OverflowError, TypeError, RecursionError) as error:  # 2024-99-99 read as a date, and the like
        what = f"holds a value that cannot be read ({' '.join(str(error).split())[:120]})"
        raise InputError(what, where=where) from None
    if content is None:
        raise InputError("is empty", where=where)
    return content


def _check_shape(text: str, where: str) -> None:
    """Counts aliases and depth on the event stream, before anything is built."""
    aliases = depth = 0
    for event in yaml.parse(text, Loader=_SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            aliases += 1
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if aliases > MAX_ALIASES or depth > MAX_DEPTH:
            what = f"more than {MAX_ALIASES} aliases" if aliases > MAX_ALIASES else f"nested deeper than {MAX_DEPTH}"
            raise InputError(what, where=f"{where}{_place(event.start_mark)}", hint="write it out plainly")


def _place(mark: Any) -> str:
    return f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""


def _hint(problem: str) -> str:
    if "given twice" in problem:
        return "keep one of them"
    if "another document" in problem:
        return "keep one document, without further --- lines"
    if "cannot start any token" in problem:
        return "indent with spaces, not tabs, and put quotes around text that begins with @, ` or %"
    return ""
