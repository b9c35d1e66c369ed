"""``MODEL_ARGS`` files: Megatron-LM's functional tests and its MoE model zoo.

As tests/functional_tests/shell_test_utils/_run_training.sh of Megatron-LM reads them: ``true`` is a switch, a value in
brackets is several words unless it is a Python list expression in parentheses, ``${NAME}`` comes from the environment.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from hapmoe.errors import InputError
from hapmoe.script.values import Invocation, Token

from .build import appended, invocation, tokens_of, word
from .tree import Node

__all__ = ["is_model_args", "read_model_args"]


def is_model_args(tree: Node) -> bool:
    """Is it a ``model_config.yaml`` of Megatron's functional tests?"""
    return tree.get("MODEL_ARGS") is not None


def read_model_args(tree: Node, path: Path, args: Sequence[str], env: Mapping[str, str]) -> Invocation:
    """The training of a ``model_config.yaml``; ``args`` are appended, ``env`` fills in its variables."""
    model = tree.get("MODEL_ARGS")
    variables = tree.get("ENV_VARS")
    assert model is not None
    exported = [(name, word(node.text, node.where, env)) for name, node in (variables.items() if variables else ())]
    known = {**{name: token.text for name, token in exported if token.text is not None}, **env}
    argv: list[Token] = []
    for flag, node in model.items():
        if not flag.startswith("-"):
            raise InputError(f"{flag!r} under MODEL_ARGS is no flag", where=node.where)
        argv += _flag(flag, node, known)
    devices = env.get("GPUS_PER_NODE", "8")
    nodes = env.get("NUM_NODES", env.get("SLURM_NNODES", ""))
    return invocation(
        path,
        [*argv, *appended(args)],
        nodes=int(nodes) if nodes.isdigit() else None,
        devices_per_node=int(devices) if devices.isdigit() else None,
        env=exported,
    )


def _flag(flag: str, node: Node, env: Mapping[str, str]) -> list[Token]:
    if isinstance(node.value, tuple):
        raise InputError(f"{flag} has a mapping for its value", where=node.where)
    if isinstance(node.value, list):  # yq writes it as text, the brackets are cut off, the rest is split
        words = ", ".join(each.text for each in node.value).split()
        return tokens_of(flag, [word(each, node.where, env) for each in words], node.where)
    try:
        text = " ".join(shlex.split(node.text))  # it passes through xargs, which takes quotes away
    except ValueError:
        raise InputError(f"{flag}: an open quote in {node.text!r}", where=node.where) from None
    if not text and node.quoted:  # left out by the test's own reader
        return []
    if text == "true" or (not text and not node.quoted):
        return tokens_of(flag, [], node.where)
    if re.fullmatch(r"\([^)]+\)", text):
        return tokens_of(flag, [word(text, node.where, env)], node.where)
    if re.fullmatch(r"\[[^\]]+\]", text):
        return tokens_of(flag, [word(each, node.where, env) for each in text[1:-1].split()], node.where)
    if re.search(r"[ |()]", text):
        return tokens_of(flag, [word(text, node.where, env)], node.where)
    return tokens_of(flag, [word(text, node.where, env)], node.where)
