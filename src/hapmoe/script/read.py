"""From a launch script (or a command) to the one training invocation it would make."""

from __future__ import annotations

import os.path
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hapmoe.errors import InputError

from .control import Control, bounded
from .files import source_of
from .flags import REFUSED, arity_of, find_flag
from .inputs import read_text
from .interpret import Shell
from .launched import sbatch_around, training_score
from .state import Launch, State, Var, World
from .traps import at_exit
from .values import (
    MARK,
    Invocation,
    Text,
    Token,
    Unknown,
    holds_secret,
    is_secret_flag,
    is_secret_name,
    without_secrets,
)
from .variables import secret

__all__ = ["read_command", "read_script"]

_NOT_HERE = "the launch command of the training, e.g. `torchrun ... pretrain_gpt.py ...`, must stand in the script"


def read_script(path: str | Path, args: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Invocation:
    """The training launch of ``path`` called with ``args`` and the environment ``env``. Nothing is executed.

    Raises :class:`InputError` when the script is none, or when its launch depends on something that is not given.
    """
    text = read_text(Path(path), str(path))
    if not text.strip():
        raise InputError("the script is empty", where=str(path), hint=_NOT_HERE)
    shebang = text.split("\n", 1)[0]
    if str(path).endswith(".py") or (shebang.startswith("#!") and "sh" not in shebang):
        raise InputError(
            "is not a shell script",
            where=str(path),
            hint="give the launch script, or `-- torchrun ... pretrain_gpt.py ...`",
        )
    return _read(text, str(path), args, env, folder=Path(path).parent)


def read_command(words: Sequence[str], env: Mapping[str, str] | None = None) -> Invocation:
    """The training launch of a command given as words, e.g. ``["torchrun", "pretrain_gpt.py", "--fp16"]``."""
    if not words:
        raise InputError("no command", where="command line")
    first = next((place for place, word in enumerate(words) if not re.match(r"[A-Za-z_]\w*=", word)), len(words))
    assigned = [f"{name}={shlex.quote(value)}" for name, _, value in (word.partition("=") for word in words[:first])]
    text = " ".join([*assigned, *(shlex.quote(word) for word in words[first:])])
    return _read(text, "command line", (), env, folder=Path.cwd())


def _read(text: str, name: str, args: Sequence[str], env: Mapping[str, str] | None, *, folder: Path) -> Invocation:
    for value in (*args, *(env or {}).values()):
        if MARK.search(value) or "\0" in value:
            raise InputError("an argument or environment value holds a private-use or NUL character", where=name)
    start = Path.cwd()
    world = World(script=name, folder=folder.absolute(), start=start)
    world.arguments_given = len(args)
    world.allow(text)
    cwd = world.marks.mark(Unknown("the folder it is started in", "$PWD", stable=True, path=str(start)))
    state = State(scopes=[{}], cwd=cwd, zero=name, positionals=tuple(Text(arg, "command line") for arg in args))
    shell = Shell(world, state, name)
    for key, value in (env or {}).items():
        if not re.fullmatch(r"[A-Za-z_]\w*", key, re.ASCII):
            raise InputError(f"{key!r} is not the name of an environment variable", where="environment")
        state.scopes[0][key] = Var(value=secret(shell, key, Text(value, "environment")), exported=True)
    if re.search(r"(?m)^#SBATCH", text):
        shell.around = sbatch_around(text)
    try:
        _run(shell, text, name)
        return _chosen(shell, name)
    except InputError as error:
        said = [_shown(shell, part) for part in (error.what, error.where, error.hint)]
        raise InputError(said[0], where=said[1], hint=said[2]) from None


def _shown(shell: Shell, text: str) -> str:
    """A message without what is secret."""
    for value in shell.world.secrets:
        text = text.replace(value, "***")
    return without_secrets(text)


def _run(shell: Shell, text: str, name: str) -> None:
    try:
        bounded(shell, ("exit", "return", "break", "continue"), lambda: shell.run_text(text, name))
        at_exit(shell)
    except RecursionError:
        raise InputError("nested too deeply", where=shell.where(), hint="an endless recursion, perhaps") from None
    except Control:
        return


def _chosen(shell: Shell, name: str) -> Invocation:
    """The one training among the Python processes started."""
    launches = shell.world.launches
    if not launches:
        note = f" ({shell.world.notes[-1]})" if shell.world.notes else ""
        raise InputError(f"the script starts no training{note}", where=name, hint=_NOT_HERE)
    scores = [training_score(launch.entry.text, launch.argv) for launch in launches]
    best = max(scores)
    candidates = [launch for launch, score in zip(launches, scores, strict=True) if score == best]
    different = {_compared(launch): launch for launch in candidates}
    for launch in candidates:
        _settled(shell, launch)
    merged = _merged(shell, list(different.values()))
    if merged is None:
        places = ", ".join(dict.fromkeys(launch.where for launch in different.values()))
        guards = list(dict.fromkeys(guard for launch in different.values() for guard in launch.guards))
        why = f", depending on the condition at {guards[0]}" if guards else ""
        raise InputError(
            f"{len(different)} launches differ in their arguments{why} ({places})",
            where=name,
            hint="make the script start one training, or give the command itself after --",
        )
    return _invocation(shell, name, candidates[-1] if len(different) == 1 else merged)


def _merged(shell: Shell, launches: list[Launch]) -> Launch | None:
    """Launches that differ only in values that are passed on, as one in which those are not known; else None."""
    last = launches[-1]
    if len({(each.entry.text, len(each.argv), each.world_size, each.nodes) for each in launches}) > 1:
        return None
    argv = list(last.argv)
    where = ", ".join(dict.fromkeys(launch.where for launch in launches))
    for place, word in enumerate(last.argv):
        if len({MARK.sub("?", each.argv[place].text) for each in launches}) > 1:
            if not all(_passed_on(shell, (each.entry, *each.argv), place + 1) for each in launches):
                return None
            why = f"differs between the launches ({where})"
            unknown = Unknown(why, "", word.where, single=False, nonempty=False, branch=where)
            argv[place] = Text(shell.world.marks.mark(unknown), word.where)
    return replace(last, argv=tuple(argv))


def _compared(launch: Launch) -> tuple[str, ...]:
    """What makes two launches the same training; values that are not known are taken as equal."""
    return tuple(MARK.sub("?", word.text) for word in (launch.entry, *launch.argv))


def _settled(shell: Shell, launch: Launch) -> None:
    """Refuse a launch whose words depend on an unknown condition, or whose number of words is not known."""
    words = (launch.entry, *launch.argv)
    for place, word in enumerate(words):
        for unknown in shell.world.marks.of(word.text):
            flag = _flag_of(words, place)
            if unknown.branch and not _passed_on(shell, words, place):
                raise InputError(
                    f"{flag} of the training depends on this condition, which is not known",
                    where=unknown.branch,
                    hint="give what it tests with --env NAME=VALUE or as an argument, or settle it in the script",
                )
            if unknown.spread and not _is_value(shell, words, place):
                raise InputError(
                    f"arguments of the training are not known: {unknown.why}",
                    where=word.where or launch.where,
                    hint="write them into the script, or give them with --env NAME=VALUE",
                )


def _passed_on(shell: Shell, words: tuple[Text, ...], place: int) -> bool:
    """One value of a flag that means nothing to a planner: it may differ, as long as it is one word."""
    before = words[place - 1].text if place > 1 else ""
    return (
        before.startswith("--")
        and "=" not in before
        and not MARK.search(before)
        and find_flag(before)[0] is None
        and before not in REFUSED
        and arity_of(before) != 0
        and not words[place].text.startswith("-")
        and not any(unknown.spread for unknown in shell.world.marks.of(words[place].text))
    )


def _flag_of(words: tuple[Text, ...], place: int) -> str:
    own = words[place].text.partition("=")[0]
    if own.startswith("--") and not MARK.search(own):
        return own
    before = words[place - 1].text if place else ""
    return (
        before
        if before.startswith("--") and not MARK.search(before)
        else "the entry"
        if place == 0
        else f"argument {place}"
    )


def _is_value(shell: Shell, words: tuple[Text, ...], place: int) -> bool:
    """Whether words of which nobody knows how many they are, stand where a flag wants its value: the program would
    refuse to run with none, or with more than it takes. Of a flag that is not known, a list may be further flags."""
    before = words[place - 1].text if place > 1 else ""
    after = words[place + 1].text if place + 1 < len(words) else "-"
    if len(words[place].text) > 1:
        return True
    if not before.startswith("--") or "=" in before or MARK.search(before) or not after.startswith("-"):
        return False
    arity = arity_of(before)
    if arity is None:
        return not any(unknown.many for unknown in shell.world.marks.of(words[place].text))
    return arity != 0


def _invocation(shell: Shell, name: str, launch: Launch) -> Invocation:
    return Invocation(
        script=name,
        entry=_token(shell, launch.entry),
        argv=_tokens(shell, launch.argv),
        launcher=launch.launcher,
        launcher_argv=_tokens(shell, launch.launcher_argv),
        world_size=launch.world_size,
        nodes=launch.nodes,
        devices_per_node=launch.devices_per_node,
        env=tuple((key, _token(shell, value, named=key)) for key, value in launch.env),
        unset=tuple(f"{key} ({where})" for key, where in shell.world.unset.items()),
        where=launch.where,
        python=tuple(MARK.sub("?", word) for word in launch.python),
        program=_program(shell, launch.entry.text),
    )


def _program(shell: Shell, entry: str) -> str:
    """The entry as a path that can be shown, when only the folder in front of it is not known."""
    if not MARK.search(entry):
        return entry
    real = shell.world.marks.real_path(entry)
    if real is not None:
        return os.path.relpath(real, shell.world.start)
    _, slash, name = MARK.split(entry)[-1].rpartition("/")
    return name if slash and name.endswith(".py") else ""


def _tokens(shell: Shell, words: tuple[Text, ...]) -> tuple[Token, ...]:
    out: list[Token] = []
    before = ""
    for word in words:
        flag, equals, _ = word.text.partition("=")
        if (equals and is_secret_flag(flag)) or (
            is_secret_flag(before) and "=" not in before and not word.text.startswith("--")
        ):
            known = not MARK.search(word.text)
            out.append(
                Token(None, "secret, referred to by name", "" if known else _token(shell, word).source, word.where)
            )
        else:
            out.append(_token(shell, word))
        before = word.text
    return tuple(out)


def _token(shell: Shell, word: Text, *, named: str = "") -> Token:
    unknowns = shell.world.marks.of(word.text)
    if named and is_secret_name(named):
        return Token(None, "secret, referred to by name", f'"${named}"', word.where)
    if holds_secret(word.text) or any(value in word.text for value in shell.world.secrets):
        return Token(None, "holds a secret", "", word.where)
    if not unknowns:
        return Token(word.text, where=word.where)
    source = source_of(shell, word.text)
    bare = len(word.text) == 1 and unknowns[0].spread
    choice = next((each for each in unknowns if each.branch), None)
    if choice and not named:  # which of the values it is only a run would tell; a launcher asks for it by name
        name = re.fullmatch(r"\$\{(\w+)\}", choice.source) if len(word.text) == 1 else None
        return Token(None, choice.why, name.group(1) if name else "", word.where)
    why = next((each.why for each in unknowns if each.secret), unknowns[0].why)
    if not all(each.source for each in unknowns):
        return Token(None, why, "", word.where)  # nothing gives this text again: a launcher asks for it
    if holds_secret(source) or holds_secret(why):
        return Token(None, "holds a secret", "", word.where)
    return Token(None, why, source if bare else f'"{source}"', word.where)
