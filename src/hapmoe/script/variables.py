"""Variables of the shell: reading, writing, name references, arrays, and what the shell itself provides."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from hapmoe.errors import InputError

from .arithmetic import Number, evaluate
from .assoc import assoc_keys, check_subscript, pass_bad_key
from .launched import product
from .state import Var
from .values import MARK, Text, Unknown, is_secret_name

if TYPE_CHECKING:
    from .interpret import Shell

__all__ = [
    "INDEXED",
    "SITE",
    "assign",
    "elements",
    "index_of",
    "missing",
    "number",
    "provided",
    "provides",
    "read_number",
    "resolve",
    "scalar",
    "secret",
    "write_number",
]

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
INDEXED = re.compile(r"([A-Za-z_]\w*)\[(.+)\]", re.ASCII | re.DOTALL)
# Set in any real shell, not known here. True: certainly not empty.
SITE = {
    "HOME": True,
    "USER": True,
    "LOGNAME": True,
    "PWD": True,
    "OLDPWD": False,
    "PATH": True,
    "SHELL": True,
    "HOSTNAME": True,
    "UID": True,
    "EUID": True,
    "PPID": True,
    "BASHPID": True,
    "RANDOM": True,
    "SRANDOM": True,
    "SECONDS": True,
    "TERM": False,
    "LANG": False,
    "TMPDIR": False,
    "PYTHONPATH": False,
    "LD_LIBRARY_PATH": False,
    "LD_PRELOAD": False,
    "LIBRARY_PATH": False,
    "CPATH": False,
    "BASH_VERSION": True,
    "EPOCHSECONDS": True,
    "EPOCHREALTIME": True,
    "BASH": True,
    "OSTYPE": True,
    "HOSTTYPE": True,
    "MACHTYPE": True,
    "GROUPS": True,
    "SHLVL": True,
    "VIRTUAL_ENV": False,
    "CONDA_PREFIX": False,
    "CONDA_DEFAULT_ENV": False,
    "LINENO": True,
    "CUDA_HOME": False,
    "COLUMNS": False,
    "BASH_SUBSHELL": True,
    "BASH_VERSINFO": True,
    "PIPESTATUS": True,
    "_": False,
}
_STABLE = frozenset(
    ("HOME", "USER", "LOGNAME", "PATH", "SHELL", "HOSTNAME", "UID", "EUID", "PYTHONPATH", "LD_LIBRARY_PATH")
)
_OF_THE_MOMENT = frozenset(("PIPESTATUS", "_", "BASH_SUBSHELL", "LINENO"))
"""What another shell would have another value of: a launcher asks for it."""
_SITE_ARRAYS = frozenset(("BASH_VERSINFO", "PIPESTATUS", "GROUPS"))
_SWITCH = re.compile(r"true|false|yes|no|on|off|none|null|0|1|-1", re.IGNORECASE)
"""Values that tell a setting (``MOE_DROP_TOKEN=true``) from a credential of such a name."""
_LARGEST_INDEX = 1_000_000


def resolve(shell: Shell, name: str) -> tuple[str, str | None]:
    """The variable (and element) that ``name`` stands for, through ``declare -n`` references."""
    index = None
    for _ in range(10):
        found = shell.state.find(name)
        if not found or not found[1].ref or not found[1].value:
            return name, index
        target = found[1].value.text
        indexed = INDEXED.fullmatch(target)
        name, index = (indexed.group(1), indexed.group(2)) if indexed else (target, None)
    raise InputError(f"a circle of name references at {name}", where=shell.where())


def provides(prefix: str) -> bool:
    """Whether bash or the site set variables whose names begin so."""
    return any(name.startswith(prefix) for name in SITE) or prefix in ("BASH_", "BASH", "COMP", "PS")


def provided(shell: Shell, name: str) -> Text | None:
    """A value that bash or the site provides."""
    state, here = shell.state, shell.where()
    if name in ("PWD",):
        return Text(state.cwd, here)
    if name in ("BASH_SOURCE", "FUNCNAME"):
        values = _frames(shell, name)
        return values[0] if values else None
    if name in SITE:
        unknown = Unknown(
            f"the environment's ${name}",
            "" if name in _OF_THE_MOMENT else f"${{{name}}}",
            "" if name in _STABLE else here,
            single=name not in ("LD_PRELOAD", "_"),
            nonempty=SITE[name],
            stable=name in _STABLE,
        )
        return Text(shell.world.marks.mark(unknown), here)
    if name == "IFS":
        return Text(" \t\n", "")
    if name.startswith("SLURM") and shell.around.slurm:
        return _slurm(shell, name)
    if name == "OPTIND":
        return Text("1", "")
    return None


_SLURM_ALWAYS = frozenset(
    (
        "SLURM_NNODES",
        "SLURM_JOB_NUM_NODES",
        "SLURM_JOB_ID",
        "SLURM_JOBID",
        "SLURM_JOB_NODELIST",
        "SLURM_NODELIST",
        "SLURM_SUBMIT_DIR",
        "SLURM_JOB_NAME",
        "SLURM_CPUS_ON_NODE",
        "SLURM_SUBMIT_HOST",
        "SLURM_JOB_PARTITION",
        "SLURM_JOB_USER",
        "SLURM_TASKS_PER_NODE",
        "SLURM_PROCID",
        "SLURM_NODEID",
        "SLURM_LOCALID",
    )
)
"""Set in every job; other names of Slurm's may also be unset, as their option is given or not."""
_SLURM_PLACES = frozenset(("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID"))


def _slurm(shell: Shell, name: str) -> Text | None:
    """What Slurm sets in a batch script and inside srun: sizes from its options, the rest not known."""
    around = shell.around
    tasks = around.tasks if around.tasks is not None else product(around.nodes, around.tasks_per_node)
    known = {
        "SLURM_NNODES": around.nodes,
        "SLURM_JOB_NUM_NODES": around.nodes,
        "SLURM_NTASKS": tasks,
        "SLURM_NPROCS": tasks,
        "SLURM_NTASKS_PER_NODE": around.tasks_per_node,
        "SLURM_GPUS_ON_NODE": around.devices_per_node,
        "SLURM_GPUS_PER_NODE": around.devices_per_node,
    }
    value = 0 if name in _SLURM_PLACES and not around.parallel else known.get(name)
    if value is not None:
        return Text(str(value), "Slurm options")
    unknown = Unknown(
        f"Slurm's ${name}",
        f"${{{name}}}",
        shell.where(),
        nonempty=name in _SLURM_ALWAYS,
        stable=name not in _SLURM_PLACES,
    )
    return Text(shell.world.marks.mark(unknown), shell.where())


def _special(shell: Shell, name: str) -> Text | None:
    state, marks, here = shell.state, shell.world.marks, shell.where()
    if name == "?":
        return Text(
            str(state.status)
            if state.status is not None
            else marks.mark(Unknown("the exit status of a command that is not run", "", here)),
            here,
        )
    if name == "#":
        if state.positional_mark:
            return Text(
                marks.derive(state.positional_mark, "the number of arguments", "$#", here, single=True, nonempty=True),
                here,
            )
        return Text(str(len(state.positionals)), here)
    if name == "0":
        return Text(state.zero, here)
    if name in "$!":
        return Text(marks.mark(Unknown("a process number", f"${name}", here)), here)
    if name == "-":
        return Text("".join(sorted({"errexit": "e", "nounset": "u"}.get(o, "") for o in state.options)) + "hB", here)
    position = int(name)
    if state.positional_mark:
        return Text(marks.derive(state.positional_mark, f"argument {name}", f"${{{name}}}", here), here)
    if position <= len(state.positionals):
        return state.positionals[position - 1]
    return None


def scalar(shell: Shell, name: str, index: str | None = None) -> Text | None:
    """The value of ``name`` (or of one element); None when it is unset."""
    if not _NAME.fullmatch(name):
        return _special(shell, name)
    name, through = resolve(shell, name)
    index = through if index is None else index
    found = shell.state.find(name)
    if not found:
        if index is not None and name in ("BASH_SOURCE", "FUNCNAME"):
            values = _frames(shell, name)
            place = number(shell, index)
            return values[place] if place is not None and 0 <= place < len(values) else None
        if index not in (None, "0", "@", "*") and name not in SITE and name not in _SITE_ARRAYS:
            pass_bad_key(shell, name, number(shell, index))
        return provided(shell, name) if index in (None, "0") or name in _SITE_ARRAYS else None
    var = found[1]
    if var.mark:
        return Text(
            shell.world.marks.derive(
                var.mark, f"an element of {name}", f"${{{name}[{index or 0}]}}", shell.where(), single=True
            ),
            shell.where(),
        )
    if var.items is None:
        place = 0 if index is None else None if var.assoc else number(shell, index)
        pass_bad_key(shell, name, place)
        return var.value if place == 0 else None
    key = index_of(shell, var, index if index is not None else "0")
    pass_bad_key(shell, name, key)
    if key is None or (isinstance(key, str) and MARK.search(key)):
        return Text(
            shell.world.marks.mark(
                Unknown(f"an element of {name} at a place that is not known", "", shell.where(), nonempty=False)
            ),
            shell.where(),
        )
    return var.items.get(key)


def elements(shell: Shell, name: str) -> tuple[list[Text], str]:
    """The elements of an array (or of a scalar as one), and a mark instead when they are not known."""
    state = shell.state
    if name in ("@", "*"):
        return list(state.positionals), state.positional_mark
    name, _ = resolve(shell, name)
    found = state.find(name)
    if not found:
        if name in ("BASH_SOURCE", "FUNCNAME"):
            return _frames(shell, name), ""
        if name in _SITE_ARRAYS:
            return [], shell.world.marks.mark(Unknown(f"the shell's ${name}", "", shell.where(), single=False))
        value = provided(shell, name)
        return ([value] if value else []), ""
    var = found[1]
    if var.mark:
        return [], var.mark
    if var.items is None:
        return ([var.value] if var.value is not None else []), ""
    if var.assoc:
        return [var.items[key] for key in assoc_keys(var.items)], ""
    return [var.items[key] for key in sorted(var.items)], ""


def _frames(shell: Shell, name: str) -> list[Text]:
    """``FUNCNAME``, which is set within functions only, or ``BASH_SOURCE``: from the innermost call outwards."""
    if name == "FUNCNAME":
        if shell.world.dropped_call and not shell.calls:
            raise InputError(
                "FUNCNAME is read outside functions after an error dropped a call, which bash does not clean up after",
                where=shell.where(),
                hint="mend the error",
            )
        return [Text(frame[0], shell.where()) for frame in reversed(shell.frames)] if shell.calls else []
    return [Text(frame[1], shell.where()) for frame in reversed(shell.frames)]


def array_items(var: Var) -> dict[int | str, Text]:
    """A copy of the elements; a scalar is element 0."""
    if var.items is not None:
        return dict(var.items)
    return {} if var.value is None else {0: var.value}


def index_of(shell: Shell, var: Var, source: str) -> int | str | None:
    """The key that a subscript's source means; None when it is not known."""
    if var.assoc:
        return shell.expand_source(source)
    place = number(shell, source)
    if place is not None and place < 0 and var.items:
        place += max(int(key) for key in var.items) + 1
    if place is not None and place > _LARGEST_INDEX:
        raise InputError("an array subscript beyond a million", where=shell.where())
    return place


def number(shell: Shell, source: str) -> Number:
    """The value of arithmetic source text."""
    return evaluate(
        shell.expand_arithmetic(source),
        lambda n, i: read_number(shell, n, i),
        lambda n, i, v: write_number(shell, n, i, v),
    )


def read_number(shell: Shell, name: str, index: str | None) -> str:
    value = scalar(shell, name, index)
    if value is None:
        missing(shell, name)
        return ""
    return value.text


def write_number(shell: Shell, name: str, index: str | None, value: Number) -> None:
    assign(shell, name, index, Text(shell.number_text(value, f"${{{name}}}"), shell.where()))


def missing(shell: Shell, name: str, where: str = "") -> None:
    """Note that ``name`` was read while unset; under ``set -u`` that ends the script."""
    if name in ("@", "*"):
        return
    label = f"${name}" if name.isdigit() else name
    if "nounset" in shell.state.options:
        hint = f"give argument {name}" if name.isdigit() else f"give --env {name}=VALUE"
        raise InputError(f"{label} is not set, and the script runs under set -u", where=shell.where(), hint=hint)
    if name.isdigit():
        shell.world.missing = name
    shell.world.unset.setdefault(label, where or shell.where())


def secret(shell: Shell, name: str, value: Text) -> Text:
    """``value``, or what stands for it when ``name`` says that it is a credential."""
    if not value.text or not is_secret_name(name) or _SWITCH.fullmatch(value.text):
        return value
    blank = any(char.isspace() for char in value.text)
    if len(value.text) >= 12 and not MARK.search(value.text):
        shell.world.secrets.add(value.text)
    return Text(
        shell.world.marks.mark(
            Unknown("secret, referred to by name", f"${name}", value.where, single=not blank, stable=True, secret=True)
        ),
        value.where,
    )


def assign(shell: Shell, name: str, index: str | None, value: Text, *, append: bool = False) -> None:
    """``name=value``, ``name[index]=value`` and the ``+=`` forms."""
    if not _NAME.fullmatch(name):
        raise InputError(f"{name!r} is not a variable name", where=shell.where())
    name, through = resolve(shell, name)
    index = through if index is None else index
    found = shell.state.find(name)
    scope, var = found if found else (shell.state.scopes[0], Var())
    if name == "_" or name in shell.world.volatile:
        return  # bash gives it the last word of each command; a trap changes those
    if var.readonly:
        raise InputError(f"{name} is read-only and assigned again", where=shell.where())
    if var.mark and not var.assoc:
        return  # what one element becomes tells nothing about an array that is not known
    value = secret(shell, name, value)
    if index is None and var.items is not None:
        index = "0"
    key = index_of(shell, var, index) if index is not None else None
    check_subscript(shell, name, key)
    found = shell.state.find(name)
    scope, var = found if found else (shell.state.scopes[0], Var())
    if var.mark:
        return
    if index is not None and (key is None or (isinstance(key, str) and MARK.search(key))):
        mark = shell.world.marks.mark(
            Unknown(
                f"an element of {name} at a place that is not known", "", shell.where(), single=False, nonempty=False
            )
        )
        scope[name] = replace(var, items=None, value=None, mark=mark)
        return
    old = (var.items or {}).get(key) if key is not None else var.value
    if append and var.items is None and key is not None:
        old = var.value if key == 0 else None
    value = _shaped(shell, var, value, old if append else None)
    if key is None:
        new = replace(var, value=value)
    else:
        items = array_items(var)
        items[key] = secret(shell, key, value) if isinstance(key, str) else value
        new = replace(var, items=items, value=None, bare=False)
    if "allexport" in shell.state.options:
        new = replace(new, exported=True)
    scope[name] = new
    if new.exported:
        shell.note_export(name)


def _shaped(shell: Shell, var: Var, value: Text, old: Text | None) -> Text:
    """``value`` joined to what it is appended to, as the variable's attributes shape it."""
    if var.integer:
        total = number(shell, value.text)
        if old is not None:
            before = number(shell, old.text)
            total = None if total is None or before is None else total + before
        return Text(shell.number_text(total, ""), value.where)
    text = shell.world.bounded((old.text if old else "") + value.text, shell.where())
    if var.case:
        text = text.upper() if var.case == "upper" else text.lower()
    return Text(text, (old.where or value.where) if old and old.text else value.where)
