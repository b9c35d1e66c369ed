"""Small programs whose output is known from their arguments: echo, printf, seq, sed 's/a/b/', cut, tr, and the like.

Each takes its arguments and standard input (None: not known) and returns its output and exit status, either of them
None where only a run would tell.
"""

from __future__ import annotations

import ast
import operator
import os.path
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .arithmetic import ArithmeticError_, evaluate
from .awk import awk
from .calculate import calculate
from .getopt_program import getopt
from .grep_sed import grep, sed
from .output import unescape
from .streams import UNKNOWN, Result, input_text, joined, lines_of, split_args
from .text_tools import head, paste, rev, sort, tac, tail, uniq, xargs
from .values import MARK, Unknown
from .variables import missing, scalar

if TYPE_CHECKING:
    from .interpret import Shell

__all__ = ["UTILITIES"]

_EXPR_COMPARES = {
    **{"=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le},
    **{">": operator.gt, ">=": operator.ge, "==": operator.eq},
}


def _cat(shell: Shell, args: list[str], stdin: str | None) -> Result:
    parsed = split_args(args)
    if parsed is None or parsed[0]:
        return UNKNOWN
    text = input_text(shell, parsed[1], stdin)
    return text, None if text is None else 0


def _dirname(shell: Shell, args: list[str], stdin: str | None) -> Result:
    args = args[1:] if args[:1] == ["--"] else args
    if len(args) != 1 or args[0].startswith("-"):
        return UNKNOWN
    tail = MARK.split(args[0])[-1].rstrip("/")
    if MARK.search(args[0]):
        if "/" not in tail:
            return shell.derived_path(args[0], os.path.dirname, "dirname") + "\n", 0
        return args[0][: len(args[0].rstrip("/"))].rpartition("/")[0] + "\n", 0
    path = args[0].rstrip("/") or ("/" if args[0] else "")
    folder = path.rpartition("/")[0].rstrip("/")
    return (folder or ("/" if path.startswith("/") else ".")) + "\n", 0


def _basename(shell: Shell, args: list[str], stdin: str | None) -> Result:
    suffix = ""
    if args[:1] == ["-s"] and len(args) == 3:
        suffix, args = args[1], args[2:]
    args = args[1:] if args[:1] == ["--"] else args
    if len(args) not in (1, 2) or args[0].startswith("-"):
        return UNKNOWN
    suffix = args[1] if len(args) == 2 else suffix
    path = args[0].rstrip("/") or args[0][:1]
    tail = MARK.split(path)[-1]
    if MARK.search(path) and "/" not in tail:
        return shell.derived_path(args[0], os.path.basename, "basename") + "\n", 0
    name = path.rpartition("/")[2] if path != "/" else "/"
    if suffix and name != suffix:
        name = name.removesuffix(suffix)
    return name + "\n", 0


def _realpath(shell: Shell, args: list[str], stdin: str | None) -> Result:
    names = [arg for arg in args if not arg.startswith("-")]
    if len(names) != 1 or any(arg.startswith("--") and arg != "--" for arg in args):
        return UNKNOWN
    return shell.absolute(names[0]) + "\n", 0


def _pwd(shell: Shell, args: list[str], stdin: str | None) -> Result:
    return shell.state.cwd + "\n", 0


_SEQ_FORMAT = re.compile(r"[^%\\]*%0?\d{0,2}(?:g|\.0f)[^%\\]*")
_MOST_IN_G = 99_999
"""Larger whole numbers may be written with an exponent."""


def _seq(shell: Shell, args: list[str], stdin: str | None) -> Result:
    separator, wide, shape = "\n", False, "%s"
    while args and args[0].startswith("-") and not re.fullmatch(r"-\d+", args[0]):
        if args[0] == "-s" and len(args) > 1:
            separator, args = args[1], args[2:]
        elif args[0].startswith("-s"):
            separator, args = args[0][2:], args[1:]
        elif args[0] == "-w":
            wide, args = True, args[1:]
        elif args[0] == "-f" and len(args) > 1:
            shape, args = args[1], args[2:]
        else:
            return UNKNOWN
    if not 1 <= len(args) <= 3 or any(not re.fullmatch(r"-?\d+", arg) for arg in args):
        return UNKNOWN
    numbers = [int(arg) for arg in args]
    first, step, last = (numbers[0] if len(numbers) > 1 else 1, numbers[1] if len(numbers) == 3 else 1, numbers[-1])
    if step == 0 or abs(last - first) // abs(step) > 20_000:
        return UNKNOWN
    width = max(map(len, args)) if wide else 0
    numbers = list(range(first, last + (1 if step > 0 else -1), step))
    if shape != "%s" and (wide or not _SEQ_FORMAT.fullmatch(shape) or max(map(abs, numbers), default=0) > _MOST_IN_G):
        return UNKNOWN
    values = [(shape % value).zfill(width) for value in numbers]
    return (separator.join(values) + "\n" if values else ""), 0


def _wc(shell: Shell, args: list[str], stdin: str | None) -> Result:
    parsed = split_args(args)
    if parsed is None or len(parsed[0]) != 1 or parsed[1]:
        return UNKNOWN
    if stdin is None or MARK.search(stdin):
        return _single(shell, args, stdin) if set(parsed[0]) <= set("lwcm") else UNKNOWN
    counts = {"l": stdin.count("\n"), "w": len(stdin.split()), "c": len(stdin.encode()), "m": len(stdin)}
    kind = next(iter(parsed[0]))
    return (f"{counts[kind]}\n", 0) if kind in counts else UNKNOWN


def _tr_set(text: str) -> str:
    text = re.sub(
        r"\[:(\w+):\]",
        lambda m: {
            "upper": "A-Z",
            "lower": "a-z",
            "digit": "0-9",
            "space": " \t\n\r\f\v",
            "blank": " \t",
            "alpha": "A-Za-z",
            "alnum": "A-Za-z0-9",
        }.get(m.group(1), ""),
        text,
    )
    text = unescape(text)[0]
    return re.sub(
        r"(.)-(.)", lambda m: "".join(map(chr, range(ord(m.group(1)), ord(m.group(2)) + 1))), text, flags=re.DOTALL
    )


def _tr(shell: Shell, args: list[str], stdin: str | None) -> Result:
    parsed = split_args(args)
    if parsed is None or stdin is None or set(parsed[0]) - {"d", "s"}:
        return UNKNOWN
    options, sets = parsed
    if MARK.search(stdin) and not (options and "d" in options):
        return shell.world.marks.derive(stdin, "", "", shell.where()), 0
    groups = [_tr_set(each) for each in sets]
    if "d" in options and len(groups) == 1:
        return "".join(char for char in stdin if char not in groups[0]), 0
    if "s" in options and len(groups) == 1:
        return re.sub(rf"([{re.escape(groups[0])}])\1+", r"\1", stdin), 0
    if len(groups) != 2 or not groups[1] or "d" in options:
        return UNKNOWN
    padded = groups[1] + groups[1][-1] * max(0, len(groups[0]) - len(groups[1]))
    text = stdin.translate({ord(a): b for a, b in reversed(list(zip(groups[0], padded, strict=False)))})
    if "s" in options:
        text = re.sub(rf"([{re.escape(groups[1])}])\1+", r"\1", text)
    return text, 0


def _cut(shell: Shell, args: list[str], stdin: str | None) -> Result:
    parsed = split_args(args, "dfcb")
    if parsed is None or set(parsed[0]) - {"d", "f", "c", "s"}:
        return UNKNOWN
    options, files = parsed
    text = input_text(shell, files, stdin)
    if text is None or MARK.search(text):
        return UNKNOWN
    spans = [re.fullmatch(r"(\d*)(-?)(\d*)", span) for span in (options.get("f") or options.get("c") or "").split(",")]
    if not all(spans):
        return UNKNOWN

    def chosen(items: list[str] | str) -> list[str]:
        keep: list[str] = []
        for place, item in enumerate(items, 1):
            for span in spans:
                assert span
                low = int(span.group(1) or 1)
                high = int(span.group(3) or len(items)) if span.group(2) else low
                if low <= place <= high:
                    keep.append(item)
                    break
        return keep

    delimiter = options.get("d") or "\t"
    out: list[str] = []
    for line in lines_of(text):
        if "c" in options:
            out.append("".join(chosen(line)))
        elif delimiter in line:
            out.append(delimiter.join(chosen(line.split(delimiter))))
        elif "s" not in options:
            out.append(line)
    return joined(out), 0


def _expr(shell: Shell, args: list[str], stdin: str | None) -> Result:
    if any(MARK.search(arg) for arg in args):
        return UNKNOWN
    if len(args) == 2 and args[0] == "length":
        return f"{len(args[1])}\n", 0 if args[1] else 1
    if len(args) == 3 and args[1] in _EXPR_COMPARES:
        sides = [int(arg) if re.fullmatch(r"-?\d+", arg) else None for arg in (args[0], args[2])]
        if None in sides and args[1] not in ("=", "!="):
            return UNKNOWN  # an order of words, which depends on the locale
        pair: tuple[Any, ...] = (args[0], args[2]) if None in sides else tuple(sides)
        value = int(_EXPR_COMPARES[args[1]](*pair))
        return f"{value}\n", 1 - value
    if not args or not all(re.fullmatch(r"-?\d{1,15}|[-+*/%()]", arg) for arg in args):
        return UNKNOWN
    try:
        value = evaluate(" ".join(args), lambda name, index: "", lambda name, index, value: None) or 0
    except ArithmeticError_:
        return "", 2
    return f"{value}\n", 0 if value else 1


def _bc(shell: Shell, args: list[str], stdin: str | None) -> Result:
    text = (stdin or "").strip()
    if args or not re.fullmatch(r"[\d\s()+*/%^-]+", text) or ("-" in text and re.search(r"[/%^]", text)):
        return UNKNOWN
    try:
        source = text.replace("/", "//").replace("^", "**")
        value = str(int(calculate(ast.parse(source, mode="eval").body)))
    except (SyntaxError, ValueError, ArithmeticError, TypeError, RecursionError):
        return UNKNOWN
    return (value + "\n", 0) if len(value) < 60 else UNKNOWN


def _envsubst(shell: Shell, args: list[str], stdin: str | None) -> Result:
    """Exported variables filled into ``$NAME`` and ``${NAME}``, those in the argument only where one is given."""
    if len(args) > 1 or any(arg.startswith("-") for arg in args) or stdin is None:
        return UNKNOWN
    names = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))", re.ASCII)
    chosen = {match[1] or match[2] for arg in args for match in names.finditer(arg)} if args else None

    def filled(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if chosen is not None and name not in chosen:
            return match.group()
        found = shell.state.find(name)
        if found and not found[1].exported:
            return ""
        value = scalar(shell, name)
        if value is None:
            missing(shell, name)
        return value.text if value else ""

    pieces, end = [], 0
    for match in names.finditer(stdin):
        pieces += [stdin[end : match.start()], filled(match)]
        end = match.end()
    return shell.world.joined([*pieces, stdin[end:]], shell.where()), 0


def _copy(shell: Shell, args: list[str], stdin: str | None, *, gone: bool = False) -> Result:
    """``cp`` and ``mv`` of one file to another name."""
    parsed = split_args(args)
    names = parsed[1] if parsed and not set(parsed[0]) - set("fnpv") else []
    if len(names) != 2 or "n" in (parsed or ({},))[0] or names[1].endswith("/") or any(map(MARK.search, names)):
        for name in args:
            if not name.startswith("-"):
                shell.write_file(name, None)
        return "", None
    text = shell.read_file(names[0])
    folder = shell.exists(names[1], "-d") is True
    shell.write_file(f"{names[1]}/{os.path.basename(names[0])}" if folder else names[1], text)
    if gone:
        shell.write_file(names[0], None)
    return "", 0 if text is not None else None


def _remove(shell: Shell, args: list[str], stdin: str | None) -> Result:
    for name in args:
        if not name.startswith("-"):
            shell.write_file(name, None)
    return "", None


def _single(shell: Shell, args: list[str], stdin: str | None) -> Result:
    """A program that prints one word, not known here."""
    return shell.world.marks.mark(
        Unknown(f"command substitution {shell.substitution}", shell.substitution, shell.where())
    ) + "\n", 0


_ONE_WORD = {
    "hostname": r"(-[sfd]|--short|--fqdn|--long|--domain)?",
    "id": r"-(u|g|un|gn|nu|ng|u -n|g -n)",
    "shuf": r"(.* )?(-n ?1|--head-count=1)( .*)?",
    "uname": r"(-[snrmpio])?",
}
"""The arguments with which these print one word; ``hostname -I``, ``shuf``, ``id`` and ``uname -a`` print several."""


def _one_word(name: str) -> Callable[[Shell, list[str], str | None], Result]:
    return lambda shell, args, stdin: (
        _single(shell, args, stdin) if re.fullmatch(_ONE_WORD[name], " ".join(args)) else UNKNOWN
    )


def _date(shell: Shell, args: list[str], stdin: str | None) -> Result:
    formats = [arg for arg in args if arg.startswith("+")]
    if formats and not re.search(r"\s|%[cnrtx]", formats[0]):
        return _single(shell, args, stdin)
    return UNKNOWN


def _tee(shell: Shell, args: list[str], stdin: str | None) -> Result:
    for name in args:
        if not name.startswith("-"):
            shell.write_file(name, stdin, append="-a" in args)
    return stdin, 0


def _touch(shell: Shell, args: list[str], stdin: str | None) -> Result:
    """``touch``: files that the script did not write may be new."""
    for name in args:
        if not name.startswith("-") and shell.absolute(name) not in shell.state.files:
            shell.write_file(name, None)
    return "", None


def _quiet(shell: Shell, args: list[str], stdin: str | None) -> Result:
    return "", None


UTILITIES: dict[str, Callable[[Shell, list[str], str | None], Result]] = {
    "cat": _cat,
    "dirname": _dirname,
    "basename": _basename,
    "realpath": _realpath,
    "readlink": _realpath,
    "pwd": _pwd,
    "seq": _seq,
    "wc": _wc,
    "tr": _tr,
    "cut": _cut,
    "grep": grep,
    "egrep": lambda s, a, i: grep(s, ["-E", *a], i),
    "sed": sed,
    "head": head,
    "tail": tail,
    "sort": sort,
    "uniq": uniq,
    "awk": awk,
    "gawk": awk,
    "mawk": awk,
    "xargs": xargs,
    "paste": paste,
    "rev": rev,
    "tac": tac,
    "envsubst": _envsubst,
    "rm": _remove,
    "mv": lambda s, a, i: _copy(s, a, i, gone=True),
    "expr": _expr,
    "getopt": getopt,
    "bc": _bc,
    "date": _date,
    "hostname": _one_word("hostname"),
    "whoami": _single,
    "nproc": _single,
    "uuidgen": _single,
    "mktemp": _single,
    "id": _one_word("id"),
    "shuf": _one_word("shuf"),
    "uname": _one_word("uname"),
    "tee": _tee,
    "mkdir": _quiet,
    "cp": _copy,
    "touch": _touch,
    "sleep": _quiet,
    "chmod": _quiet,
    "ln": _quiet,
    "pip": _quiet,
}
