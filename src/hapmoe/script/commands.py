"""Running one command's words: a function, a builtin, a small program, or a launcher."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hapmoe.errors import InputError

from . import inputs
from .builtins import BUILTINS
from .calculate import python_code
from .control import Control, bounded
from .files import absolute, on_disk
from .launched import Entry, Inside, Refused, looks_like_training, sbatch_around
from .launchers import unwrap
from .sourcing import set_positionals
from .state import Launch, Var
from .syntax import Assign, Function
from .traps import within_function
from .utilities import UTILITIES
from .values import MARK, Text
from .variables import scalar, secret

if TYPE_CHECKING:
    from .interpret import Shell

__all__ = ["run_words"]

_DEEPEST_CALL = 30
_SEVERAL = frozenset(("srun", "mpirun", "mpiexec", "mpiexec.hydra", "orterun"))


def run_words(shell: Shell, words: list[Text | Assign]) -> None:
    """Follow a simple command whose words are expanded."""
    shell.world.step(shell.where(), 1 + len(words) // 20)
    if not words:  # `command -p`
        shell.state.status = 0
        return
    first = words[0]
    name = first.text if isinstance(first, Text) else first.source
    if name in shell.world.aliases:
        raise InputError(
            f"{name} is an alias here, which is not followed",
            where=shell.where(),
            hint=f"write a function in place of the alias at {shell.world.aliases[name]}",
        )
    if name in shell.state.functions:
        _call(shell, name, [word for word in words[1:] if isinstance(word, Text)])
        return
    if name in BUILTINS:
        BUILTINS[name](shell, words[1:])
        return
    texts = [word if isinstance(word, Text) else Text(word.source, shell.where(word.line)) for word in words]
    if name in ("command", "builtin") and len(texts) > 1:
        if texts[1].text in ("-v", "-V"):
            BUILTINS["type"](shell, list(texts[1:]))
        else:
            run_words(shell, [word for word in texts[1:] if word.text != "-p"])
        return
    if name == "exec":
        _exec(shell, texts)
        return
    if name in UTILITIES:
        _utility(shell, name, [word.text for word in texts[1:]])
        return
    _external(shell, texts)


def _call(shell: Shell, name: str, args: list[Text]) -> None:
    function = shell.state.functions[name]
    if not isinstance(function, Function):
        raise InputError(f"which function {name} is depends on the condition at {function}", where=shell.where())
    if len(shell.calls) >= _DEEPEST_CALL:
        raise InputError(
            f"the function {name} calls itself too deeply", where=shell.where(), hint="an endless recursion, perhaps"
        )
    saved, saved_mark = shell.state.positionals, shell.state.positional_mark
    line, outer_file = shell.current_line, shell.file
    _, shell.file, source = shell.world.defined[id(function)]
    set_positionals(shell, args)
    shell.state.scopes.append({})
    depth = len(shell.state.scopes)
    shell.calls.append(name)
    shell.frames.append((name, source))
    loops, shell.loops = shell.loops, 0
    try:
        within_function(
            shell, lambda: shell.nested(lambda: bounded(shell, ("return",), lambda: shell.node(function.body)))
        )
    except Control as control:
        shell.world.dropped_call |= control.kind == "abort"
        raise
    finally:
        shell.world.dropped_call |= any(each.kind == "abort" for each in shell.pending)
        shell.calls.pop()
        shell.frames.pop()
        shell.file = outer_file
        shell.loops = loops
        del shell.state.scopes[depth - 1 :]
        shell.state.positionals, shell.state.positional_mark = saved, saved_mark
        shell.current_line = line


def _utility(shell: Shell, name: str, args: list[str]) -> None:
    wild = any(each.spread for arg in args for each in shell.world.marks.of(arg))
    output, status = (None, None) if wild else UTILITIES[name](shell, args, shell.state.stdin)
    if output is None or status is None:
        _touch_files(shell, args if name in ("sed", "cp", "tee", "touch") else [])
    shell.print(output, what=name)
    shell.state.status = status


def _touch_files(shell: Shell, args: list[str]) -> None:
    """A program that is not followed may have changed the files named in its arguments."""
    for arg in args:
        key = absolute(shell, arg) if arg and len(arg) < 4000 else ""
        if key in shell.state.files:
            shell.state.files[key] = None


def _exec(shell: Shell, words: list[Text]) -> None:
    """``exec``: nothing of this shell follows the command, whatever it is."""
    rest = words[1:]
    while rest and re.fullmatch(r"-[cl]*a?|--", rest[0].text):
        rest = rest[2:] if rest[0].text.endswith("a") else rest[1:]
    shell.state.status = 0
    if not rest:
        return
    if rest[0].text.startswith("-") or any(each.spread for each in shell.world.marks.of(rest[0].text)):
        raise InputError("what exec runs is not known", where=shell.where(), hint="write the command into the script")
    shell.state.traps, shell.state.functions = {}, {}
    shell.nested(lambda: run_words(shell, list(rest)))
    raise Control("exit")


def _opaque(shell: Shell, text: str) -> bool:
    return bool(MARK.search(text)) and (len(text) == 1 or any(each.spread for each in shell.world.marks.of(text)))


def _environment(shell: Shell, name: str) -> str | None:
    found = shell.state.find(name)
    return found[1].value.text if found and found[1].exported and found[1].value else None


def _external(shell: Shell, words: list[Text]) -> None:
    name = words[0].text
    if [each.source for each in shell.world.marks.of(name)] == ["${BASH}"] and len(name) == 1:
        words, name = [Text("bash", words[0].where), *words[1:]], "bash"
    if name.startswith("-"):
        shell.world.notes.append(f"{shell.where()}: {name!r} is taken as a command")
        shell.state.status = 127
        return
    if MARK.search(name) and (_opaque(shell, name) or not name.endswith((".py", ".sh"))) and "python" not in name:
        _unknown_command(shell, words, "its command word is not known")
        return
    path = on_disk(shell, name) if "/" in name and not name.endswith(".py") else None
    if name.endswith(".sh") or (path and _is_shell(path)) or absolute(shell, name) in shell.state.files:
        _script(shell, Inside("script", tuple(words), shell.around))
        return
    if name.endswith(".py") and "/" in name:
        words = [Text("python", words[0].where), *words]
    base = name.rpartition("/")[2]
    if base in _SEVERAL and any(word.text == ":" for word in words):
        _several(shell, words)
        return
    try:
        step = unwrap(words, shell.around, lambda key: _environment(shell, key), lambda text: _opaque(shell, text))
    except Refused as why:
        _unknown_command(shell, words, str(why))
        return
    shell.state.status = None
    if isinstance(step, Entry):
        _record(shell, step)
    elif step is None:
        _touch_files(shell, [word.text for word in words[1:]])
        _unknown_command(shell, words, f"{name!r} is not a launcher known here")
        shell.print(None, what=name)
    else:
        _inside(shell, step, words)


def _several(shell: Shell, words: list[Text]) -> None:
    """``srun ... : ...``, ``mpirun ... : ...``: one job of several commands; those that are equal count together."""
    parts: list[list[Text]] = [[]]
    for word in words[1:]:
        if word.text == ":":
            parts.append([])
        else:
            parts[-1].append(word)
    since = len(shell.world.launches)
    for place, part in enumerate(parts):
        if part and shell.around.groups and not any(word.text.startswith("--het-group") for word in part):
            part = [Text(f"--het-group={place}", part[0].where), *part]
        if part:
            run_words(shell, [words[0], *part])
    made = shell.world.launches[since:]
    texts = {tuple(word.text for word in (each.entry, *each.argv)) for each in made}
    if len(made) < 2 or len(texts) > 1:
        return  # told apart, or refused, where the training is chosen
    sums = [
        None if None in values else sum(value or 0 for value in values)
        for values in ([each.world_size for each in made], [each.nodes for each in made])
    ]
    devices = {each.devices_per_node for each in made}
    whole = replace(
        made[0], world_size=sums[0], nodes=sums[1], devices_per_node=devices.pop() if len(devices) == 1 else None
    )
    shell.world.launches[since:] = [whole]


def _is_shell(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.readline(200)
    except OSError:
        return False
    return head.startswith(b"#!") and b"sh" in head


def _unknown_command(shell: Shell, words: list[Text], why: str) -> None:
    """Pass over a command, unless it may well be the training."""
    shell.state.status = None
    shell.world.outside = True
    entries = any(word.text.endswith(".py") for word in words)
    if looks_like_training(words) or (
        entries and ("option" in why or "would take" in why or ("not known" in why and MARK.search(words[0].text)))
    ):
        raise InputError(
            f"what this command runs is not clear: {why}",
            where=shell.where(),
            hint="give the training command itself, e.g. `hapmoe plan -- torchrun ... pretrain_gpt.py ...`",
        )


def _no_command(shell: Shell, words: list[Text]) -> None:
    """A launcher whose options take all of its words, as ``srun --jobid $UNSET bash -c '...'`` does."""
    shell.state.status = None
    if any(".py" in word.text for word in words):
        raise InputError(
            f"{words[0].text} is left without a command: the value of one of its options is empty, perhaps",
            where=shell.where(),
            hint="give the variables it needs with --env NAME=VALUE",
        )


def _inside(shell: Shell, step: Inside, words: list[Text]) -> None:
    if step.kind == "none":
        shell.print(None, what=words[0].text)
        return
    if step.kind == "python":
        code = step.code.text if step.code else shell.state.stdin
        output, status = python_code(code, [word.text for word in step.words]) if code is not None else (None, None)
        shell.print(output, what="python -c")
        shell.state.status = status
        return
    if step.kind == "words" and not step.words:
        _no_command(shell, words)
        return
    outer = shell.around
    shell.around = step.around
    values = {key: Var(value=secret(shell, key, value), exported=True) for key, value in step.env}
    shell.state.scopes.append(values)
    depth = len(shell.state.scopes)
    try:
        if step.kind == "words":
            shell.nested(lambda: run_words(shell, list(step.words)))
        elif step.kind == "script":
            _script(shell, step)
        else:
            _code(shell, step, words[0])
    finally:
        shell.around = outer
        if len(shell.state.scopes) >= depth:
            del shell.state.scopes[depth - 1 :]


def _code(shell: Shell, step: Inside, launcher: Text) -> None:
    """``bash -c code`` and shells that read code from their input."""
    if step.code is not None:
        text = step.code.text
        where = step.code.where
    else:
        text, where = shell.state.stdin or "", shell.where()
        if shell.state.stdin is None:
            return
    wild = [each for each in shell.world.marks.of(text) if not each.single]
    if wild and not MARK.sub("", text).strip():
        return
    line = int(where.rpartition(":")[2]) if where.rpartition(":")[2].isdigit() else shell.current_line
    positionals = list(step.words)
    zero = positionals.pop(0) if positionals and step.code is not None else launcher
    _child(shell, text, shell.file, line, zero.text, positionals, step)


def _script(shell: Shell, step: Inside) -> None:
    name = step.words[0].text
    key = absolute(shell, name)
    text = shell.state.files.get(key)
    label = MARK.sub("?", name)
    if text is None:
        path = on_disk(shell, name) if key not in shell.state.files else None
        if path is None:
            shell.state.status = None
            shell.world.notes.append(f"{shell.where()}: the script {label!r} that it runs is not here")
            if looks_like_training(list(step.words)):
                raise InputError(
                    f"the script {label!r} that it runs is not here",
                    where=shell.where(),
                    hint="put it beside the script",
                )
            return
        label = str(path) if MARK.search(name) else name
        text = inputs.read_text(path, label, where=shell.where())
    if step.batch:
        given = step.around
        from_file = sbatch_around(text)
        step = replace(
            step,
            around=replace(
                from_file,
                nodes=given.nodes or from_file.nodes,
                tasks=given.tasks or from_file.tasks,
                tasks_per_node=given.tasks_per_node or from_file.tasks_per_node,
                devices_per_node=given.devices_per_node or from_file.devices_per_node,
            ),
        )
    _child(shell, text, label, 1, name, list(step.words[1:]), step)


def _child(shell: Shell, text: str, label: str, line: int, zero: str, args: list[Text], step: Inside) -> None:
    """A shell of its own: it inherits exported variables and files; only files and output come back."""
    if len(shell.sources) > 20:
        raise InputError("scripts that start each other too deeply", where=shell.where())
    exported: dict[str, Var] = {}
    for scope in shell.state.scopes:
        exported.update(
            {name: var for name, var in scope.items() if var.exported and var.items is None and not var.mark}
        )
    sources, shell.sources = shell.sources, [*shell.sources, zero]
    calls, shell.calls = shell.calls, []
    frames, shell.frames = shell.frames, [("main", zero)] if step.kind == "script" else []
    conditions, shell.conditions = shell.conditions, 0
    tolerant, shell.tolerant = shell.tolerant, 0
    outer_around, shell.around = shell.around, step.around

    def run() -> None:
        state = shell.state
        state.scopes = [exported]
        state.functions = {}
        state.options = step.options
        state.zero = zero
        state.status = 0
        set_positionals(shell, args)
        shell.run_text(text, label, line)

    try:
        shell.nested(lambda: shell.subshell(run))
    finally:
        shell.sources, shell.calls, shell.frames, shell.conditions, shell.tolerant, shell.around = (
            sources,
            calls,
            frames,
            conditions,
            tolerant,
            outer_around,
        )
    if any(launch.where for launch in shell.world.launches):
        shell.state.status = None if shell.state.status == 0 else shell.state.status


def _record(shell: Shell, entry: Entry) -> None:
    """Remember a Python process the script would start."""
    shell.world.outside = True
    if shell.placeholder:
        raise InputError(f"the placeholder {shell.placeholder} is not filled in", where=shell.where())
    env: dict[str, Text] = {}
    for name in shell.state.exports:
        found = shell.state.find(name)
        value = scalar(shell, name) if found and found[1].exported else None
        if value is not None:
            env[name] = value
    for scope in shell.state.scopes[1:]:
        env.update({name: var.value for name, var in scope.items() if var.exported and var.value is not None})
    if len(shell.world.launches) > 2000:
        raise InputError("too many launches", where=shell.where())
    shell.world.launches.append(
        Launch(
            entry.launcher,
            entry.launcher_argv,
            entry.entry,
            entry.argv,
            entry.python,
            entry.world_size,
            entry.nodes,
            entry.devices_per_node,
            tuple(env.items()),
            shell.where(),
            shell.state.guards,
        )
    )
    shell.print(None, what=MARK.sub("?", entry.entry.text))
    shell.state.status = None
