"""YAML whose values keep their text and their line: what a flag gets is what stands in the file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hapmoe.errors import InputError

__all__ = ["Node", "Scalar", "read_tree"]

Scalar = str | int | float | bool | None
_FLOAT = re.compile(r"[-+]?(?:\d[\d_]*)?\.?\d+(?:[eE][-+]?\d+)?|[-+]?\d[\d_]*\.(?:[eE][-+]?\d+)?")
_MOST_BYTES = 1 << 20
_DEEPEST = 20
_MOST_ALIASES = 16


@dataclass(frozen=True, slots=True)
class Node:
    """A mapping (``entries``, repeated keys kept), a list, or a scalar's text; ``where`` is ``file:line``."""

    value: tuple[tuple[str, Node], ...] | list[Node] | str
    where: str
    quoted: bool = False

    @staticmethod
    def of(entries: Mapping[str, Node], where: str) -> Node:
        return Node(tuple(entries.items()), where)

    def get(self, *keys: str) -> Node | None:
        """The node under a path of keys, if there is one; of a repeated key the last."""
        node: Node | None = self
        for key in keys:
            node = dict(node.items()).get(key) if node is not None else None
        return node

    def items(self) -> tuple[tuple[str, Node], ...]:
        """The entries of a mapping; nothing of anything else."""
        return self.value if isinstance(self.value, tuple) else ()

    @property
    def text(self) -> str:
        """A scalar's text; empty for anything else."""
        return self.value if isinstance(self.value, str) else ""

    @property
    def scalar(self) -> Scalar:
        """A scalar as YAML means it (with ``1e-5`` a number, as OmegaConf and YAML 1.2 read it)."""
        text = self.text
        if self.quoted:
            return text
        lower = text.lower()
        if lower in ("true", "false"):
            return lower == "true"
        if lower in ("", "~", "null"):
            return None
        if re.fullmatch(r"[-+]?(?:0|[1-9][\d_]*)", text):
            return int(text)
        return float(text.replace("_", "")) if _FLOAT.fullmatch(text) else text


def read_tree(path: Path) -> Node:
    """The YAML file as nodes. Raises :class:`InputError` for what is no single, plain document."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InputError("is larger than any training configuration", where=str(path))
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError("no such file", where=str(path)) from None
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read ({' '.join(str(error).split())[:100]})", where=str(path)) from None
    try:
        _check(text, str(path))
        root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        said = getattr(error, "problem", None) or str(error)
        raise InputError(f"is not YAML ({' '.join(str(said).split())[:100]})", where=place) from None
    if root is None:
        raise InputError("is empty", where=str(path))
    return _node(root, str(path))


def _check(text: str, name: str) -> None:
    """Bounds on depth and aliases, on the event stream, before anything is built."""
    depth = aliases = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        aliases += isinstance(event, yaml.AliasEvent)
        if depth > _DEEPEST or aliases > _MOST_ALIASES:
            raise InputError(
                "is nested too deeply or has too many aliases",
                where=f"{name}:{getattr(event.start_mark, 'line', 0) + 1}",
            )


def _node(node: yaml.Node, name: str) -> Node:
    where = f"{name}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.MappingNode):
        entries: list[tuple[str, Node]] = []
        for key, value in node.value:
            made = _node(value, name)
            if key.tag == "tag:yaml.org,2002:merge":
                entries = [*made.items(), *entries]
            else:
                entries.append((str(key.value), made))
        return Node(tuple(entries), where)
    if isinstance(node, yaml.SequenceNode):
        return Node([_node(each, name) for each in node.value], where)
    return Node(str(node.value), where, quoted=getattr(node, "style", None) is not None)
