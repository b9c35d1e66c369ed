"""Commands that the shell itself has: they change variables, options, the folder, or leave a construct."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from hapmoe.errors import InputError

from . import inputs
from .arithmetic import evaluate
from .control import Control
from .declaring import declaration, unset, unset_reference
from .files import absolute
from .output import echo, printf
from .sourcing import Args, eval_, set_positionals, source, texts
from .state import Var
from .syntax import Assign
from .tests import BadTest, bracket
from .traps import trap
from .values import MARK, Text, Unknown
from .variables import assign, read_number, scalar, write_number

if TYPE_CHECKING:
    from .interpret import Shell

__all__ = ["BUILTINS"]

_SLURM_PROGRAMS = frozenset(("srun", "sbatch", "scontrol", "squeue", "sinfo", "scancel"))
_SHOPTS = frozenset(("extglob", "inherit_errexit", "nullglob", "failglob", "nocasematch", "lastpipe", "expand_aliases"))
_LONG_OPTIONS = {"E": "errtrace", "e": "errexit", "u": "nounset", "f": "noglob", "a": "allexport", "n": "noexec"}


def _ok(shell: Shell, args: Args) -> None:
    shell.state.status = 0


def _lists(shell: Shell, args: Args) -> None:
    """A builtin that sets something, or lists it when no value stands among its words: a list is not known."""
    if all(word.startswith("-") for word in texts(args)):
        shell.print(None, what="a list of the shell's settings")
    shell.state.status = 0


def _alias(shell: Shell, args: Args) -> None:
    """Aliases count only where the script turns them on."""
    if "expand_aliases" in shell.state.options:
        shell.world.aliases.update({word.partition("=")[0]: shell.where() for word in texts(args) if "=" in word})
    _lists(shell, args)
    if any("=" not in word and not word.startswith("-") for word in texts(args)):
        shell.state.status = None


def _false(shell: Shell, args: Args) -> None:
    shell.state.status = 1


def _unknown(shell: Shell, args: Args) -> None:
    if args:
        shell.print(None, what="a job's state")
    shell.state.status = None


def _echo(shell: Shell, args: Args) -> None:
    shell.print(echo(texts(args)))
    shell.state.status = 0


def _printf(shell: Shell, args: Args) -> None:
    words = texts(args)
    name = ""
    if words[:1] == ["-v"] and len(words) > 2:
        name, words = words[1], words[2:]
    words = words[1:] if words[:1] == ["--"] else words
    if not words:
        shell.state.status = 2
        return
    try:
        text = printf(shell, words)
    except (ValueError, TypeError, OverflowError):
        shell.state.status = 1
        text = shell.world.marks.mark(Unknown("the output of printf", "", shell.where(), single=False))
    else:
        shell.state.status = 0
    if name:
        indexed = re.fullmatch(r"(\w+)\[(.*)\]", name)
        assign(
            shell,
            indexed.group(1) if indexed else name,
            indexed.group(2) if indexed else None,
            Text(text, shell.where()),
        )
    else:
        shell.print(text)


def _test(shell: Shell, args: Args) -> None:
    words = texts(args)
    if words[-1:] == ["]"]:
        words = words[:-1]
    try:
        value = bracket(shell, words)
        shell.state.status = None if value is None else int(not value)
    except BadTest as error:
        shell.world.notes.append(f"{shell.where()}: test: {error}")
        shell.state.status = 2


def _unset(shell: Shell, args: Args) -> None:
    words = texts(args)
    functions = "-f" in words
    for word in words:
        if word in ("-v", "-f", "-n"):
            continue
        if functions:
            shell.state.functions.pop(word, None)
        elif "-n" in words:
            unset_reference(shell, word)
        else:
            unset(shell, word)
            if word in shell.state.functions and not shell.state.find(word):
                shell.state.functions.pop(word)
    shell.state.status = 0


def _set(shell: Shell, args: Args) -> None:
    words = list(args)
    options = set(shell.state.options)
    positional: list[Text | Assign] | None = None
    while words:
        word = words.pop(0)
        text = word.text if isinstance(word, Text) else word.source
        if text == "--":
            positional = words
            break
        if text in ("-o", "+o"):
            if words:
                name = texts([words.pop(0)])[0]
                (options.add if text == "-o" else options.discard)(name)
        elif re.fullmatch(r"[-+][a-zA-Z]+", text):
            for letter in text[1:]:
                name = _LONG_OPTIONS.get(letter, "")
                if letter == "o" and words:
                    name = texts([words.pop(0)])[0]
                if name:
                    (options.add if text[0] == "-" else options.discard)(name)
        elif text == "-":
            continue
        else:
            positional = [word, *words]
            break
    shell.state.options = frozenset(options)
    shell.state.status = 0
    if "noexec" in options:  # what follows is only read
        raise Control("exit")
    if positional is not None:
        set_positionals(
            shell, [word if isinstance(word, Text) else Text(word.source, shell.where()) for word in positional]
        )


def _shift(shell: Shell, args: Args) -> None:
    text = texts(args)[0] if args else "1"
    if shell.state.positional_mark:
        shell.state.status = 0
        return
    count = int(text) if text.isdigit() else None
    if count is None:
        raise InputError("shift by a number that is not known", where=shell.where())
    if count > len(shell.state.positionals):
        shell.state.status = 1
        return
    shell.state.positionals = shell.state.positionals[count:]
    shell.state.status = 0


def _getopts(shell: Shell, args: Args) -> None:
    words = texts(args)
    if len(words) < 2:
        shell.state.status = 2
        return
    spec, name = words[0], words[1]
    values = words[2:] if len(words) > 2 else [value.text for value in shell.state.positionals]
    index_text, inner_text = scalar(shell, "OPTIND"), scalar(shell, "__GETOPTS_AT")
    index = int(index_text.text) if index_text and index_text.text.isdigit() else 1
    inner = int(inner_text.text) if inner_text and inner_text.text.isdigit() and inner_text.text != "0" else 1
    here = shell.where()

    def put(key: str, value: str) -> None:
        assign(shell, key, None, Text(value, here))

    word = values[index - 1] if index <= len(values) else ""
    if MARK.search(word[:1]) or shell.state.positional_mark:
        raise InputError("getopts reads an argument that is not known", where=here)
    if not word.startswith("-") or word in ("-", "--"):
        put(name, "?")
        put("OPTIND", str(index + (word == "--")))
        shell.state.status = 1
        return
    letter, rest = word[inner], word[inner + 1 :]
    silent = spec.startswith(":")
    place = spec.find(letter) if letter != ":" else -1
    index, inner = (index, inner + 1) if rest else (index + 1, 1)

    def refused(shown: str) -> None:
        """An option that is not one, or lacks its value: ``OPTARG`` tells which only where getopts is silent."""
        put(name, shown if silent else "?")
        if silent:
            put("OPTARG", letter)
        else:
            unset(shell, "OPTARG")

    if place < 0:
        refused("?")
    elif spec[place + 1 : place + 2] == ":":
        if rest:
            put("OPTARG", rest)
            index, inner = index + 1, 1
            put(name, letter)
        elif index <= len(values):
            put("OPTARG", values[index - 1])
            index += 1
            put(name, letter)
        else:
            refused(":")
    else:
        put(name, letter)
        unset(shell, "OPTARG")
    put("OPTIND", str(index))
    put("__GETOPTS_AT", str(inner))
    shell.state.status = 0


def _let(shell: Shell, args: Args) -> None:
    value: int | None = 0
    for word in texts(args):
        value = evaluate(word, lambda n, i: read_number(shell, n, i), lambda n, i, v: write_number(shell, n, i, v))
    shell.state.status = None if value is None else int(value == 0)


def _exit(shell: Shell, args: Args) -> None:
    words = texts(args)
    if words:
        shell.state.status = (
            int(words[0]) & 255 if re.fullmatch(r"-?\d+", words[0]) else None if MARK.search(words[0]) else 2
        )
    raise Control("exit")


def _return(shell: Shell, args: Args) -> None:
    words = texts(args)
    if words:
        shell.state.status = (
            int(words[0]) & 255 if re.fullmatch(r"-?\d+", words[0]) else None if MARK.search(words[0]) else 2
        )
    if not shell.calls and len(shell.sources) < 2:
        shell.state.status = 2
        return
    raise Control("return")


def _leave(shell: Shell, args: Args, kind: str) -> None:
    if not shell.loops:
        shell.state.status = 0
        return
    text = texts(args)[0] if args else "1"
    shell.state.status = 0
    raise Control(kind, min(int(text), shell.loops) if text.isdigit() and int(text) else 1)


def _cd(shell: Shell, args: Args) -> None:
    words = [word for word in texts(args) if word not in ("-P", "-L", "-e", "--")]
    if words == ["-"]:
        value = scalar(shell, "OLDPWD")
        target = value.text if value else ""
    elif words:
        target = words[0]
    else:
        value = scalar(shell, "HOME")
        target = value.text if value else ""
    shell.state.status = 0
    if not target:
        return
    if any(each.spread for each in shell.world.marks.of(target)):
        target = shell.world.marks.derive(target, "", "$PWD", shell.where(), single=True, nonempty=True)
    before = shell.state.cwd
    shell.state.cwd = absolute(shell, target)
    shell.state.scopes[0]["OLDPWD"] = Var(value=Text(before, shell.where()))
    if shell.state.find("PWD"):
        assign(shell, "PWD", None, Text(shell.state.cwd, shell.where()))


def _pushd(shell: Shell, args: Args) -> None:
    found = shell.state.scopes[0].get("DIRSTACK", Var(items={}))
    items = dict(found.items or {})
    items[len(items)] = Text(shell.state.cwd, shell.where())
    shell.state.scopes[0]["DIRSTACK"] = Var(items=items)
    _cd(shell, args)
    shell.print(None if False else shell.state.cwd + "\n")


def _popd(shell: Shell, args: Args) -> None:
    items = dict(shell.state.scopes[0].get("DIRSTACK", Var()).items or {})
    shell.state.status = 0 if items else 1
    if items:
        shell.state.cwd = items.pop(len(items) - 1).text
        shell.state.scopes[0]["DIRSTACK"] = Var(items=items)
        shell.print(shell.state.cwd + "\n")


def _shopt(shell: Shell, args: Args) -> None:
    words = texts(args)
    letters = "".join(word[1:] for word in words if word.startswith("-"))
    names = [word for word in words if not word.startswith("-")]
    if "o" in letters and names and set(letters) & set("su"):
        for name in names:
            BUILTINS["set"](shell, [Text("-o" if "s" in letters else "+o"), Text(name)])
        return
    shell.state.status = 0
    if "s" in letters:
        shell.state.options |= _SHOPTS.intersection(names)
    elif "u" in letters:
        shell.state.options -= _SHOPTS.intersection(names)
    else:
        if "q" not in letters:
            shell.print(None, what="shopt")
        if not shell.state.options.issuperset(names):
            shell.state.status = None  # some are on from the start, and the site may turn on others


def _hash(shell: Shell, args: Args) -> None:
    names = [word for word in texts(args) if not word.startswith("-")]
    here = all(name in shell.state.functions or name in BUILTINS for name in names)
    shell.state.status = 0 if here else None


def _unalias(shell: Shell, args: Args) -> None:
    shell.state.status = 0 if texts(args) == ["-a"] else None


def _known_command(shell: Shell, args: Args) -> None:
    """``type``, ``hash``, ``which``, ``command -v``: whether a program is there."""
    options = [word for word in texts(args) if word.startswith("-")]
    words = [word for word in texts(args) if not word.startswith("-")]
    functions = bool(words) and all(word in shell.state.functions for word in words)
    here = functions or (bool(words) and all(word in BUILTINS for word in words))
    slurm = shell.around.slurm and bool(words) and _SLURM_PROGRAMS.issuperset(words)
    shell.state.status = 0 if here or slurm else None
    mark = Unknown(f"command substitution {shell.substitution}", shell.substitution, shell.where(), nonempty=False)
    if here and options == ["-t"]:
        shell.print(("function" if functions else "builtin") + "\n")
    elif here and "-v" in options:
        shell.print(words[0] + "\n")
    else:
        shell.print(shell.world.marks.mark(mark) + "\n")


BUILTINS: dict[str, Callable[[Shell, Args], None]] = {
    ":": _ok,
    "true": _ok,
    "false": _false,
    "echo": _echo,
    "printf": _printf,
    "test": _test,
    "[": _test,
    "unset": _unset,
    "set": _set,
    "shift": _shift,
    "getopts": _getopts,
    "let": _let,
    "eval": eval_,
    "source": source,
    ".": source,
    "exit": _exit,
    "return": _return,
    "cd": _cd,
    "pushd": _pushd,
    "popd": _popd,
    "read": lambda s, a: inputs.read(s, texts(a)),
    "mapfile": lambda s, a: inputs.mapfile(s, texts(a)),
    "readarray": lambda s, a: inputs.mapfile(s, texts(a)),
    "shopt": _shopt,
    "trap": trap,
    "ulimit": _lists,
    "umask": _lists,
    "wait": _unknown,
    "jobs": _unknown,
    "kill": _unknown,
    "disown": _ok,
    "alias": _alias,
    "unalias": _unalias,
    "hash": _hash,
    "type": _known_command,
    "which": _known_command,
    "bind": _ok,
    "enable": _ok,
    "declare": lambda s, a: declaration(s, a, "declare"),
    "typeset": lambda s, a: declaration(s, a, "declare"),
    "local": lambda s, a: declaration(s, a, "local"),
    "export": lambda s, a: declaration(s, a, "export"),
    "readonly": lambda s, a: declaration(s, a, "readonly"),
    "break": lambda s, a: _leave(s, a, "break"),
    "continue": lambda s, a: _leave(s, a, "continue"),
    "caller": _unknown,
    "times": _ok,
    "module": _ok,
    "ml": _ok,
}
