"""Which kind of input a path or a command is, by its content."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hapmoe.errors import InputError
from hapmoe.script.options import LAUNCHERS
from hapmoe.script.read import read_command, read_script
from hapmoe.script.values import Invocation

from .flagscale import is_flagscale, read_flagscale
from .hugging_face import is_hugging_face, read_hugging_face
from .megatron_yaml import is_megatron_yaml, read_megatron_yaml
from .model_args import is_model_args, read_model_args
from .tree import Node, read_tree

__all__ = ["read_input"]

_COMMAND = re.compile(r"(?:.*/)?(?:python|pypy)[\d.]*|[A-Za-z_]\w*=.*|bash|sh")
_MOST_BYTES = 4_000_000
_READERS = (
    (is_model_args, read_model_args),
    (is_flagscale, read_flagscale),
    (is_megatron_yaml, read_megatron_yaml),
)


def read_input(source: str | Path, args: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Invocation:
    """The training behind ``source args...``: a script, a configuration file, or the first word of a command.

    A launch script (and any file that is neither YAML nor JSON) is followed; ``args`` are its arguments. Of a
    configuration they are further arguments of the training program (of FlagScale also ``key=value`` overrides).
    Raises :class:`InputError` where nothing of this kind is there, or what it needs is not given.
    """
    name, given = str(source), dict(env or {})
    path = Path(source)
    if isinstance(source, str) and (name in LAUNCHERS or _COMMAND.fullmatch(name)) and not path.is_file():
        return read_command([name, *args], given)
    suffix = path.suffix.lower()
    if suffix == ".json":
        return _from_json(path, name, args, given)
    if suffix in (".yaml", ".yml"):
        tree = read_tree(path)
        for fits, read in _READERS:
            if fits(tree):
                return read(tree, path, args, given)
        raise InputError("is YAML of no known kind", where=name, hint=_kinds(tree))
    return read_script(source, args, given)


def _from_json(path: Path, name: str, args: Sequence[str], env: dict[str, str]) -> Invocation:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InputError("is larger than any model configuration", where=name)
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError("no such file", where=name) from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot be read as JSON ({' '.join(str(error).split())[:100]})", where=name) from None
    if not is_hugging_face(config):
        raise InputError("is JSON, but not a model's config.json", where=name, hint="it must hold model_type")
    return read_hugging_face(config, path, args, env)


def _kinds(tree: Node) -> str:
    if tree.get("pools") is not None:
        return "it looks like a cluster file: give it with --cluster"
    return (
        "known are MODEL_ARGS files of Megatron's tests, FlagScale's train files and Megatron's --yaml-cfg files; "
        "of a launch script give the script"
    )
