"""``source`` and ``eval``, and what they share with the other builtins: words and positional parameters."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hapmoe.errors import InputError

from . import inputs
from .control import Control, bounded
from .files import absolute, on_disk
from .syntax import Assign
from .values import MARK, Text

if TYPE_CHECKING:
    from .interpret import Shell

__all__ = ["Args", "eval_", "set_positionals", "source", "texts"]

Args = list[Text | Assign]
# Files that set up a shell or a toolchain: search paths and prompts, nothing that a training's arguments are made of.
_SETS_UP_TOOLS = re.compile(
    r"/bin/activate$|/conda\.sh$|/\.?bashrc$|/\.(?:bash_)?profile$|^/etc/profile|/modules/.*init/|/init/bash$|/etc/profile\.d/"
    r"|/set_?env\.sh$|/setvars\.sh$|/lmod/|/nvm\.sh$|^activate$"
)
_SHELL_HOOK = re.compile(r"conda|mamba|ssh-agent|modulecmd|direnv|pyenv|dircolors|register-python-argcomplete")


def texts(args: Args) -> list[str]:
    return [arg.text if isinstance(arg, Text) else arg.source for arg in args]


def _is_wild(shell: Shell, text: str) -> bool:
    return any(not each.single for each in shell.world.marks.of(text))


def set_positionals(shell: Shell, words: list[Text]) -> None:
    spread = [each for word in words for each in shell.world.marks.of(word.text) if each.spread]
    shell.state.positionals = () if spread else tuple(words)
    shell.state.positional_mark = shell.world.marks.mark(spread[0]) if spread else ""


def eval_(shell: Shell, args: Args) -> None:
    text = " ".join(texts(args))
    wild = [each for each in shell.world.marks.of(text) if not each.single]
    if wild and not MARK.sub("", text).strip():
        if _SHELL_HOOK.search(wild[0].source):
            shell.state.status = 0
            return
        raise InputError(
            f"eval runs text that is not known ({wild[0].why})",
            where=shell.where(),
            hint="put what it sets into the script or give it with --env NAME=VALUE",
        )
    shell.world.step(shell.where(), 1 + len(text) // 10)
    shell.run_text(text, shell.file, shell.current_line)


def source(shell: Shell, args: Args) -> None:
    if not args:
        shell.state.status = 2
        return
    first = args[0]
    name = first.text if isinstance(first, Text) else first.source
    key = absolute(shell, name)
    text, label = shell.state.files.get(key), MARK.sub("?", name)
    if text is None:
        path = on_disk(shell, name) if key not in shell.state.files else None
        if path is None:
            _source_missing(shell, name, key)
            return
        label = str(path) if MARK.search(name) else name
        text = inputs.read_text(path, label, where=shell.where())
    if any(_is_wild(shell, line.lstrip()[:1]) for line in text.split("\n")):
        raise InputError(
            f"the file {label!r} that it sources is made by a program that is not run",
            where=shell.where(),
            hint="give what it sets with --env NAME=VALUE and drop the line",
        )
    saved, saved_mark = shell.state.positionals, shell.state.positional_mark
    rest = [arg for arg in args[1:] if isinstance(arg, Text)]
    if rest:
        set_positionals(shell, rest)
    shell.sources.append(name)
    shell.frames.append(("source", name))
    if len(shell.sources) > 25:
        raise InputError("files that source each other too deeply", where=shell.where())
    try:
        bounded(shell, ("return",), lambda: shell.run_text(text, label))
    finally:
        shell.sources.pop()
        shell.frames.pop()
    if rest:
        shell.state.positionals, shell.state.positional_mark = saved, saved_mark


def _source_missing(shell: Shell, name: str, key: str) -> None:
    if name == "/dev/null" or _SETS_UP_TOOLS.search(name):
        shell.state.status = 0
        return
    if shell.tolerant:
        shell.state.status = 1
        return
    if key in shell.state.assumed:
        raise Control("exit")
    raise InputError(
        f"the file {MARK.sub('?', name)!r} that it sources is not here",
        where=shell.where(),
        hint="put it beside the script, or give what it sets with --env NAME=VALUE and drop the line",
    )
