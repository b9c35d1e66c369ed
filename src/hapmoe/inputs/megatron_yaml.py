"""Megatron-LM's ``--yaml-cfg`` files: ``language_model``, ``model_parallel``, and the other arguments beside them.

Keys are attributes of the configuration, not flags (megatron/training/yaml_arguments.py): ``add_bias_linear: False`` is
``--disable-bias-linear``, ``num_moe_experts`` is ``--num-experts``. Megatron ignores flags beside such a file, so the
plan's launcher gives everything as flags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hapmoe.errors import InputError
from hapmoe.script.arity import ARITY
from hapmoe.script.values import Invocation, Token

from .build import appended, invocation, tokens_of, word
from .tree import Node

__all__ = ["is_megatron_yaml", "read_megatron_yaml"]

_RENAMED = {
    "num_moe_experts": "--num-experts",
    "layernorm_epsilon": "--norm-epsilon",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "rotary_interleaved": "--rotary-interleaved",
    "fp8": "--fp8-format",
}
_WHEN_FALSE = {
    "add_bias_linear": "--disable-bias-linear",
    "add_position_embedding": "--no-position-embedding",
    "overlap_p2p_comm": "--no-overlap-p2p-communication",
}
_SWITCHED = {"activation_func": {"swiglu": "--swiglu", "squaredrelu": "--squared-relu", "gelu": ""}}
_NOT_FLAGS = frozenset(("num_query_groups", "group_query_attention", "swiglu", "gated_linear_unit"))


def is_megatron_yaml(tree: Node) -> bool:
    """Is it a file for Megatron's ``--yaml-cfg``: a language model with its parallel sizes?"""
    return tree.get("language_model") is not None and tree.get("model_parallel") is not None


def read_megatron_yaml(tree: Node, path: Path, args: Sequence[str], env: Mapping[str, str]) -> Invocation:
    """The training of a ``--yaml-cfg`` file; ``args`` are appended, ``env`` fills in its variables."""
    entries = [*_entries(tree, "language_model"), *_entries(tree, "model_parallel")]
    entries += [(key, node) for key, node in tree.items() if key not in ("language_model", "model_parallel")]
    argv: list[Token] = []
    for key, node in entries:
        argv += _flag(key, node, env)
    groups = tree.get("language_model", "num_query_groups")
    if groups is not None and groups.scalar is not None:
        argv += [Token("--group-query-attention", where=groups.where)]
        argv += tokens_of("--num-query-groups", [word(groups.text, groups.where, env)], groups.where)
    return invocation(path, [*argv, *appended(args)])


def _entries(tree: Node, section: str) -> list[tuple[str, Node]]:
    node = tree.get(section)
    return list(node.items()) if node else []


def _flag(key: str, node: Node, env: Mapping[str, str]) -> list[Token]:
    if key in _NOT_FLAGS:
        return []
    if isinstance(node.value, tuple):
        raise InputError(f"{key} is a mapping, which this kind of file does not have", where=node.where)
    name = _RENAMED.get(key, "--" + key.replace("_", "-"))
    if isinstance(node.value, list):
        return tokens_of(name, [word(each.text, each.where, env) for each in node.value], node.where)
    value = node.scalar
    if value is None:
        return []
    if key in _SWITCHED:
        if str(value) not in _SWITCHED[key]:
            raise InputError(f"{key}: {value!r} is not known", where=node.where)
        flag = _SWITCHED[key][str(value)]
        return [Token(flag, where=node.where)] if flag else []
    if isinstance(value, bool):
        return _switch(key, name, value, node.where)
    # Attributes that are no flags (hooks, buffers) are set by Megatron itself.
    return tokens_of(name, [word(node.text, node.where, env)], node.where) if ARITY.get(name, 0) != 0 else []


def _switch(key: str, name: str, value: bool, where: str) -> list[Token]:
    if value:
        return [Token(name, where=where)] if ARITY.get(name) == 0 else []
    opposite = _WHEN_FALSE.get(key) or next(
        (flag for flag in (f"--no-{name[2:]}", f"--disable-{name[2:]}") if ARITY.get(flag) == 0), ""
    )
    return [Token(opposite, where=where)] if opposite else []
