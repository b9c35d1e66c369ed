"""From flags and values to an :class:`Invocation`, credentials left out as a script's are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hapmoe.script.values import Invocation, Token, holds_secret, is_secret_flag, is_secret_name

__all__ = ["ENTRY", "appended", "invocation", "tokens_of", "word"]

ENTRY = "pretrain_gpt.py"
_VARIABLE = re.compile(r"\$\{(\w+)\}|\$(\w+)")


def word(text: str, where: str, env: Mapping[str, str]) -> Token:
    """A value, with ``${NAME}`` filled in from ``env``; what is not given stays a variable of the launcher."""
    missing: list[str] = []

    def one(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in env:
            missing.append(name)
        return env.get(name, match[0])

    filled = _VARIABLE.sub(one, text)
    if holds_secret(filled) or any(is_secret_name(match[1] or match[2]) for match in _VARIABLE.finditer(text)):
        return Token(None, "holds a secret", "", where)
    if not missing:
        return Token(filled, where=where)
    names = ", ".join(dict.fromkeys(missing))
    whole = _VARIABLE.fullmatch(filled)
    escaped = re.sub(r'([\\"`])', r"\\\1", filled)
    source = missing[0] if whole else '"' + _VARIABLE.sub(lambda m: f"${{{m[1] or m[2]}:?}}", escaped) + '"'
    return Token(None, f"{names} is not given", source, where)


def tokens_of(flag: str, values: Sequence[Token], where: str) -> list[Token]:
    """A flag and its values; of a flag that takes a credential the value is left out."""
    if is_secret_flag(flag):
        values = [Token(None, "secret, referred to by name", "", value.where) for value in values]
    return [Token(flag, where=where), *values]


def appended(args: Sequence[str]) -> list[Token]:
    """Arguments that the user gives behind the file: the last occurrence of a flag counts."""
    out: list[Token] = []
    for arg in args:
        before = out[-1].text or "" if out else ""
        secret = is_secret_flag(before) and not arg.startswith("--")
        out.append(Token(None, "secret, referred to by name", "", "") if secret else Token(arg, where="command line"))
    return out


def invocation(
    path: Path,
    argv: Sequence[Token],
    *,
    entry: str = ENTRY,
    nodes: int | None = None,
    devices_per_node: int | None = None,
    env: Sequence[tuple[str, Token]] = (),
    unset: Sequence[str] = (),
) -> Invocation:
    """The training that torchrun would start with ``argv``."""
    world = nodes * devices_per_node if nodes is not None and devices_per_node is not None else None
    return Invocation(
        script=str(path),
        entry=Token(entry, where=str(path)),
        argv=tuple(argv),
        launcher="torchrun",
        launcher_argv=(),
        world_size=world,
        nodes=nodes,
        devices_per_node=devices_per_node,
        env=tuple(
            (name, Token(None, "secret", "", token.where) if is_secret_name(name) else token) for name, token in env
        ),
        unset=tuple(unset),
        where=str(path),
        program=entry,
    )
