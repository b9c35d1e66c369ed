"""FlagScale's train configuration (OmegaConf): ``system``, ``model`` and ``data`` flattened into Megatron's flags.

As ``flatten_dict_to_args`` in flagscale/runner/utils.py: names get dashes, ``true`` is a switch, ``false`` is left out,
nested mappings only group. The file is either the experiment (``defaults: - train: 7b``) or the train file itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hapmoe.errors import InputError
from hapmoe.script.values import Invocation, Token

from .build import appended, invocation, tokens_of, word
from .tree import Node, read_tree

__all__ = ["is_flagscale", "read_flagscale"]

_REFERENCE = re.compile(r"\$\{([^${}]+)\}")
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_LEFT_OUT = frozenset(("log_dir", "details_dir", "scripts_dir", "pids_dir"))
_DEEPEST = 8


def is_flagscale(tree: Node) -> bool:
    """Is it a FlagScale configuration: an experiment, or a system with a model?"""
    if tree.get("experiment") is not None:
        return True
    return tree.get("system") is not None and tree.get("model") is not None


def read_flagscale(tree: Node, path: Path, args: Sequence[str], env: Mapping[str, str]) -> Invocation:
    """The training of a FlagScale configuration; ``args`` may be ``key=value`` overrides or further flags."""
    root = _composed(tree, path)
    flags = []
    for place, arg in enumerate(args):
        override = _OVERRIDE.fullmatch(arg)
        if arg.startswith("-") or not override:
            flags = list(args[place:])
            break
        root = _overridden(root, override[1].split("."), Node(override[2], "command line"))
    train = root.get("train")
    backend = root.get("experiment", "task", "backend")
    kind = root.get("experiment", "task", "type")
    if (backend and backend.text != "megatron") or (kind and kind.text != "train"):
        said = backend if backend and backend.text != "megatron" else kind
        assert said is not None
        raise InputError(f"{said.text!r} is not a training with Megatron", where=said.where)
    if train is None or train.get("model") is None:
        raise InputError("holds no train configuration", where=str(path), hint="it must have system, model and data")
    argv: list[Token] = []
    merged: dict[str, Node] = {}
    for section in ("system", "model", "data"):
        node = train.get(section)
        merged.update(node.items() if node else ())
    argv += _flattened(Node.of(merged, str(path)), root, env)
    runner = root.get("experiment", "runner")
    entry = root.get("experiment", "task", "entrypoint")
    exported = root.get("experiment", "envs")
    variables = (
        []
        if exported is None
        else [(name, _value(node, root, env)) for name, node in exported.items() if isinstance(node.value, str)]
    )
    return invocation(
        path,
        [*argv, *appended(flags)],
        entry=entry.text if entry else "flagscale/train/train_gpt.py",
        nodes=_count(runner, "nnodes"),
        devices_per_node=_count(runner, "nproc_per_node"),
        env=variables,
    )


def _count(runner: Node | None, key: str) -> int | None:
    node = runner.get(key) if runner else None
    value = node.scalar if node else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _composed(tree: Node, path: Path) -> Node:
    """The experiment with the files that ``defaults`` names; a train file stands under ``train`` alone."""
    if tree.get("experiment") is None:
        return Node.of({"train": tree}, tree.where)
    entries = dict(tree.items())
    defaults = tree.get("defaults")
    for each in defaults.value if defaults and isinstance(defaults.value, list) else []:
        for group, name in each.items():
            file = path.parent / group / f"{name.text}.yaml"
            if not re.fullmatch(r"[\w./-]+", name.text) or not file.is_file():
                raise InputError(f"the file {group}/{name.text}.yaml that it names is not here", where=name.where)
            included = read_tree(file)
            entries[group] = _merged(included, entries[group]) if group in entries else included
    return Node.of(entries, tree.where)


def _merged(base: Node, over: Node) -> Node:
    if not base.items() or not over.items():
        return over
    entries = dict(base.items())
    for key, node in over.items():
        entries[key] = _merged(entries[key], node) if key in entries else node
    return Node.of(entries, base.where)


def _overridden(node: Node, keys: list[str], value: Node) -> Node:
    entries = dict(node.items())
    entries[keys[0]] = (
        value if len(keys) == 1 else _overridden(entries.get(keys[0], Node((), value.where)), keys[1:], value)
    )
    return Node.of(entries, node.where)


def _flattened(node: Node, root: Node, env: Mapping[str, str]) -> list[Token]:
    out: list[Token] = []
    for key, each in node.items():
        if key in _LEFT_OUT:
            continue
        flag = "--" + key.replace("_", "-")
        if isinstance(each.value, tuple):
            out += _flattened(each, root, env)
        elif isinstance(each.value, list):
            out += tokens_of(flag, [_value(item, root, env) for item in each.value], each.where)
        else:
            value = _value(each, root, env)
            if value.text in ("True", "False") and not each.quoted:
                out += tokens_of(flag, [], each.where) if value.text == "True" else []
            else:
                out += tokens_of(flag, [value], each.where)
    return out


def _value(node: Node, root: Node, env: Mapping[str, str], depth: int = 0) -> Token:
    """A scalar as OmegaConf resolves and Python prints it."""
    if not _REFERENCE.search(node.text):
        return word(str(node.scalar), node.where, {}) if "$" not in node.text else Token(node.text, where=node.where)
    if depth > _DEEPEST:
        raise InputError(f"{node.text} refers to itself", where=node.where)
    whole = _REFERENCE.fullmatch(node.text)
    if whole:
        target = root.get(*whole[1].split("."))
        if target is not None and isinstance(target.value, str):
            return replace(_value(target, root, env, depth + 1), where=node.where)
        if whole[1].startswith("oc.env:"):
            name, _, default = whole[1].removeprefix("oc.env:").partition(",")
            if name in env or default:
                return Token(env.get(name, default.strip()), where=node.where)
            return Token(None, f"{name} is not given", name, node.where)
        return Token(None, f"{node.text} is not given", re.sub(r"\W+", "_", whole[1]).strip("_").upper(), node.where)
    text = node.text
    for match in _REFERENCE.finditer(node.text):
        piece = _value(Node(match[0], node.where), root, env, depth + 1)
        if piece.text is None:
            return Token(None, piece.why, "", node.where)
        text = text.replace(match[0], piece.text)
    return Token(text, where=node.where)
