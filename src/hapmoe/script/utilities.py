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
from typing import TYPE_CHECKING

from .patterns import translate_ere
from .values import MARK, Unknown

if TYPE_CHECKING:
    from .interpret import Shell

__all__ = ["UTILITIES", "echo", "printf", "python_code"]

Result = tuple[str | None, int | None]
_UNKNOWN: Result = (None, None)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b", '"': '"'}


def _unescape(text: str) -> tuple[str, bool]:
    """Backslash escapes done, and whether ``\\c`` ended the output."""
    out: list[str] = []
    pos = 0
    while pos < len(text):
        char = text[pos]
        pos += 1
        if char != "\\" or pos >= len(text):
            out.append(char)
            continue
        code = re.compile(r"x([0-9a-fA-F]{1,2})|0?([0-7]{1,3})").match(text, pos)
        if code:
            out.append(chr(int(code.group(1), 16) if code.group(1) else int(code.group(2), 8)))
            pos = code.end()
        elif text[pos] == "c":
            return "".join(out), True
        else:
            out.append(_ESCAPES.get(text[pos], "\\" + text[pos]))
            pos += 1
    return "".join(out), False


def echo(args: list[str]) -> str:
    newline, escapes = True, False
    while args and re.fullmatch(r"-[neE]+", args[0]):
        newline = newline and "n" not in args[0]
        escapes = "e" in args[0] or (escapes and "E" not in args[0])
        args = args[1:]
    text, ended = _unescape(" ".join(args)) if escapes else (" ".join(args), False)
    return text if ended or not newline else text + "\n"


def printf(shell: Shell, args: list[str]) -> str:
    """The output of ``printf``; formats are reused until the arguments are used up."""
    template, values = args[0], list(args[1:])
    out: list[str] = []
    while True:
        before = len(values)
        out.append(_printf_once(shell, template, values))
        if not values or len(values) == before:
            return "".join(out)


def _printf_once(shell: Shell, template: str, values: list[str]) -> str:
    def one(match: re.Match[str]) -> str:
        flags, width, precision, kind = match.groups()
        if kind == "%":
            return "%"
        width = values.pop(0) if width == "*" and values else width
        value = values.pop(0) if values else ""
        if MARK.search(value):
            return value if not width else shell.world.marks.derive(value, "", "", shell.where())
        if kind in "diouxX":
            number = _c_number(value)
            body = {"d": "d", "i": "d", "o": "o", "u": "d", "x": "x", "X": "X"}[kind]
            return ("%" + flags + width + (precision or "") + body) % number
        if kind in "fFeEgG":
            return ("%" + flags + width + (precision or "") + kind) % float(value or 0)
        if kind == "q":
            return value if re.fullmatch(r"[\w@%+=:,./-]+", value) else re.sub(r"([^\w@%+=:,./-])", r"\\\1", value) or "''"
        if kind == "b":
            value = _unescape(value)[0]
        value = value[:1] if kind == "c" else value
        return ("%" + flags + width + (precision or "") + "s") % value

    pieces = re.split(r"(%[-+ 0#]*(?:\*|\d*)(?:\.\d*)?[diouxXfFeEgGsbcq%])", template)
    out: list[str] = []
    for piece in pieces:
        match = re.fullmatch(r"%([-+ 0#]*)(\*|\d*)(\.\d*)?([diouxXfFeEgGsbcq%])", piece)
        if match:
            out.append(one(match))
            continue
        out.append(_unescape(piece)[0])
    return "".join(out)


def _c_number(text: str) -> int:
    text = text.strip()
    if text[:1] in "'\"" and text:
        return ord(text[1:2] or "\0")
    match = re.match(r"[-+]?(?:0[xX][0-9a-fA-F]+|\d+)", text)
    if not match:
        return 0
    digits = match.group()
    return int(digits, 16) if "x" in digits.lower() else int(digits, 8) if re.fullmatch(r"[-+]?0[0-7]+", digits) else int(digits)


def _split_args(args: list[str], valued: str = "") -> tuple[dict[str, str], list[str]] | None:
    """Short options (those in ``valued`` take a value) and operands; None on an option that is not known to be simple."""
    options: dict[str, str] = {}
    operands: list[str] = []
    pending = list(args)
    while pending:
        arg = pending.pop(0)
        if arg == "--":
            return options, operands + pending
        if arg.startswith("--") or arg == "-" or not arg.startswith("-"):
            if arg.startswith("--"):
                return None
            operands.append(arg)
            continue
        letters = arg[1:]
        while letters:
            letter, letters = letters[0], letters[1:]
            if letter in valued:
                options[letter] = letters or (pending.pop(0) if pending else "")
                break
            options[letter] = ""
    return options, operands


def _input(shell: Shell, files: list[str], stdin: str | None) -> str | None:
    if not files:
        return stdin
    texts = [stdin if name == "-" else shell.read_file(name) for name in files]
    return None if None in texts else "".join(text for text in texts if text is not None)


def _lines(text: str) -> list[str]:
    return text[:-1].split("\n") if text.endswith("\n") else text.split("\n") if text else []


def _joined(lines: list[str]) -> str:
    return "".join(line + "\n" for line in lines)


def _cat(shell: Shell, args: list[str], stdin: str | None) -> Result:
    parsed = _split_args(args)
    if parsed is None or parsed[0]:
        return _UNKNOWN
    text = _input(shell, parsed[1], stdin)
    return text, None if text is None else 0


def _dirname(shell: Shell, args: list[str], stdin: str | None) -> Result:
    if len(args) != 1 or args[0].startswith("-"):
        return _UNKNOWN
    tail = MARK.split(args[0])[-1].rstrip("/")
    if MARK.search(args[0]):
        if "/" not in tail:
            return shell.derived_path(args[0], os.path.dirname, "dirname") + "\n", 0
        return args[0][:len(args[0].rstrip("/"))].rpartition("/")[0] + "\n", 0
    path = args[0].rstrip("/") or ("/" if args[0] else "")
    folder = path.rpartition("/")[0].rstrip("/")
    return (folder or ("/" if path.startswith("/") else ".")) + "\n", 0


def _basename(shell: Shell, args: list[str], stdin: str | None) -> Result:
    suffix = ""
    if args[:1] == ["-s"] and len(args) == 3:
        suffix, args = args[1], args[2:]
    if len(args) not in (1, 2) or args[0].startswith("-"):
        return _UNKNOWN
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
    if len(names) != 1 or any(arg.startswith("--") for arg in args):
        return _UNKNOWN
    return shell.absolute(names[0]) + "\n", 0


def _pwd(shell: Shell, args: list[str], stdin: str | None) -> Result:
    return shell.state.cwd + "\n", 0


def _seq(shell: Shell, args: list[str], stdin: str | None) -> Result:
    separator = "\n"
    while args and args[0].startswith("-") and not re.fullmatch(r"-\d+", args[0]):
        if args[0] == "-s" and len(args) > 1:
            separator, args = args[1], args[2:]
        elif args[0].startswith("-s"):
            separator, args = args[0][2:], args[1:]
        else:
            return _UNKNOWN
    if not 1 <= len(args) <= 3 or any(not re.fullmatch(r"-?\d+", arg) for arg in args):
        return _UNKNOWN
    numbers = [int(arg) for arg in args]
    first, step, last = (numbers[0] if len(numbers) > 1 else 1, numbers[1] if len(numbers) == 3 else 1, numbers[-1])
    if step == 0 or abs(last - first) // abs(step) > 20_000:
        return _UNKNOWN
    values = [str(value) for value in range(first, last + (1 if step > 0 else -1), step)]
    return (separator.join(values) + "\n" if values else ""), 0


def _wc(shell: Shell, args: list[str], stdin: str | None) -> Result:
    parsed = _split_args(args)
    if parsed is None or len(parsed[0]) != 1 or parsed[1]:
        return _UNKNOWN
    if stdin is None or MARK.search(stdin):
        return _UNKNOWN
    counts = {"l": stdin.count("\n"), "w": len(stdin.split()), "c": len(stdin.encode()), "m": len(stdin)}
    kind = next(iter(parsed[0]))
    return (f"{counts[kind]}\n", 0) if kind in counts else _UNKNOWN


def _tr_set(text: str) -> str:
    text = re.sub(r"\[:(\w+):\]", lambda m: {"upper": "A-Z", "lower": "a-z", "digit": "0-9", "space": " \t\n\r\f\v",
                                             "blank": " \t", "alpha": "A-Za-z", "alnum": "A-Za-z0-9"}.get(m.group(1), ""), text)
    text = _unescape(text)[0]
    return re.sub(r"(.)-(.)", lambda m: "".join(map(chr, range(ord(m.group(1)), ord(m.group(2)) + 1))), text, flags=re.DOTALL)


def _tr(shell: Shell, args: list[str], stdin: str | None) -> Result:
    parsed = _split_args(args)
    if parsed is None or stdin is None or set(parsed[0]) - {"d", "s"}:
        return _UNKNOWN
    options, sets = parsed
    if MARK.search(stdin) and not (options and "d" in options):
        return shell.world.marks.derive(stdin, "", "", shell.where()), 0
    groups = [_tr_set(each) for each in sets]
    if "d" in options and len(groups) == 1:
        return "".join(char for char in stdin if char not in groups[0]), 0
    if "s" in options and len(groups) == 1:
        return re.sub(rf"([{re.escape(groups[0])}])\1+", r"\1", stdin), 0
    if len(groups) != 2 or not groups[1] or "d" in options:
        return _UNKNOWN
    padded = groups[1] + groups[1][-1] * max(0, len(groups[0]) - len(groups[1]))
    text = stdin.translate({ord(a): b for a, b in reversed(list(zip(groups[0], padded, strict=False)))})
    if "s" in options:
        text = re.sub(rf"([{re.escape(groups[1])}])\1+", r"\1", text)
    return text, 0


def _cut(shell: Shell, args: list[str], stdin: str | None) -> Result:
    parsed = _split_args(args, "dfcb")
    if parsed is None or set(parsed[0]) - {"d", "f", "c", "s"}:
        return _UNKNOWN
    options, files = parsed
    text = _input(shell, files, stdin)
    if text is None or MARK.search(text):
        return _UNKNOWN
    spans = [re.fullmatch(r"(\d*)(-?)(\d*)", span) for span in (options.get("f") or options.get("c") or "").split(",")]
    if not all(spans):
        return _UNKNOWN

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
    for line in _lines(text):
        if "c" in options:
            out.append("".join(chosen(line)))
        elif delimiter in line:
            out.append(delimiter.join(chosen(line.split(delimiter))))
        elif "s" not in options:
            out.append(line)
    return _joined(out), 0


def _basic_to_extended(pattern: str) -> str:
    """A basic regular expression as an extended one."""
    pattern = re.sub(r"\\([(){}+?|])|([(){}+?|])", lambda m: m.group(1) or "\\" + m.group(2), pattern)
    return re.sub(r"^\*", r"\\*", pattern)


def _compiled(pattern: str, *, extended: bool, flags: int = 0) -> re.Pattern[str] | None:
    try:
        return re.compile(translate_ere(pattern if extended else _basic_to_extended(pattern)), flags)
    except re.error:
        return None


def _grep(shell: Shell, args: list[str], stdin: str | None) -> Result:
    parsed = _split_args(args, "emA")
    if parsed is None or set(parsed[0]) - set("qEeivcowFPmsxr"):
        return _UNKNOWN
    options, operands = parsed
    pattern = options["e"] if "e" in options else operands.pop(0) if operands else ""
    text = _input(shell, operands, stdin)
    if text is None or MARK.search(text + pattern) or "r" in options:
        return _UNKNOWN
    source = re.escape(pattern) if "F" in options else pattern
    regex = _compiled(source, extended=bool(options.keys() & {"E", "P", "F"}), flags=re.IGNORECASE if "i" in options else 0)
    if regex is None or "w" in options or "x" in options:
        return _UNKNOWN
    found = [line for line in _lines(text) if bool(regex.search(line)) != ("v" in options)]
    if options.get("m", "").isdigit():
        found = found[:int(options["m"])]
    status = 0 if found else 1
    if "q" in options:
        return "", status
    if "c" in options:
        return f"{len(found)}\n", status
    if "o" in options:
        found = [match.group() for line in found for match in regex.finditer(line) if match.group()]
    return _joined(found), status


def _sed(shell: Shell, args: list[str], stdin: str | None) -> Result:
    parsed = _split_args(args, "e")
    if parsed is None or set(parsed[0]) - set("eEr"):
        return _UNKNOWN
    options, operands = parsed
    program = options["e"] if "e" in options else operands.pop(0) if operands else ""
    text = _input(shell, operands, stdin)
    if text is None or MARK.search(text + program):
        return _UNKNOWN
    lines = _lines(text)
    for command in _sed_commands(program):
        match = re.fullmatch(r"s(.)(.*)", command, re.DOTALL)
        pieces = re.split(rf"(?<!\\){re.escape(match.group(1))}", match.group(2)) if match else []
        if len(pieces) != 3 or set(pieces[2]) - set("gI"):
            return _UNKNOWN
        regex = _compiled(pieces[0].replace("\\" + match.group(1), match.group(1)) if match else "",
                          extended=bool(options.keys() & {"E", "r"}), flags=re.IGNORECASE if "I" in pieces[2] else 0)
        if regex is None:
            return _UNKNOWN
        by = _sed_replacement(pieces[1], match.group(1) if match else "/")
        lines = [regex.sub(by, line, count=0 if "g" in pieces[2] else 1) for line in lines]
    return _joined(lines), 0


def _sed_commands(program: str) -> list[str]:
    return [piece.strip() for piece in re.split(r";\s*(?=s[^\w\s])|\n", program) if piece.strip()]


def _sed_replacement(by: str, delimiter: str) -> str:
    by = by.replace("\\" + delimiter, delimiter)
    return re.sub(r"\\(\d)|\\n|\\(.)|(&)|(\\$)", lambda m: rf"\g<{m.group(1)}>" if m.group(1) else
                  r"\g<0>" if m.group(3) else "\n" if m.group(0) == "\\n" else (m.group(2) or "").replace("\\", r"\\"), by)


def _head(shell: Shell, args: list[str], stdin: str | None, *, tail: bool = False) -> Result:
    args = [f"-n{arg[1:]}" if re.fullmatch(r"-\d+", arg) else arg for arg in args]
    parsed = _split_args(args, "nc")
    if parsed is None or "c" in parsed[0]:
        return _UNKNOWN
    count = parsed[0].get("n", "10")
    text = _input(shell, parsed[1], stdin)
    if text is None or not count.isdigit():
        return _UNKNOWN
    if any(not unknown.single for unknown in shell.world.marks.of(text)):
        return _UNKNOWN
    lines = _lines(text)
    return _joined(lines[len(lines) - min(int(count), len(lines)):] if tail else lines[:int(count)]), 0


def _tail(shell: Shell, args: list[str], stdin: str | None) -> Result:
    return _head(shell, args, stdin, tail=True)


def _sort(shell: Shell, args: list[str], stdin: str | None) -> Result:
    parsed = _split_args(args)
    if parsed is None or set(parsed[0]) - set("urn"):
        return _UNKNOWN
    text = _input(shell, parsed[1], stdin)
    if text is None or MARK.search(text):
        return _UNKNOWN
    lines = _lines(text)
    if "n" in parsed[0]:
        if not all(re.fullmatch(r"-?\d+", line) for line in lines):
            return _UNKNOWN
        lines.sort(key=int)
    elif all(re.fullmatch(r"[a-z0-9]*", line) for line in lines):
        lines.sort()
    else:
        return _UNKNOWN  # the order of other characters depends on the locale
    if "u" in parsed[0]:
        lines = list(dict.fromkeys(lines))
    return _joined(lines[::-1] if "r" in parsed[0] else lines), 0


def _awk(shell: Shell, args: list[str], stdin: str | None) -> Result:
    parsed = _split_args(args, "Fv")
    if parsed is None or "v" in parsed[0] or not parsed[1]:
        return _UNKNOWN
    options, operands = parsed
    program = re.fullmatch(r"\s*\{\s*print\s+\$(\d+|NF)\s*;?\s*\}\s*", operands.pop(0))
    text = _input(shell, operands, stdin)
    if not program or text is None or MARK.search(text):
        return _UNKNOWN
    separator = options.get("F", " ")
    if separator != " " and not re.fullmatch(r"[^\\.*?+|()\[\]{}^$]", separator):
        return _UNKNOWN
    out = []
    for line in _lines(text):
        pieces = line.split() if separator == " " else line.split(separator)
        place = len(pieces) if program.group(1) == "NF" else int(program.group(1))
        out.append(line if place == 0 else pieces[place - 1] if place <= len(pieces) else "")
    return _joined(out), 0


_OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}


def _calculate(node: ast.expr) -> float:
    """The value of a plain arithmetic expression; ValueError on anything else."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value) if isinstance(node.value, float) else int(str(node.value))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_calculate(node.left), _calculate(node.right))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base, power = _calculate(node.left), _calculate(node.right)
        if abs(base) <= 1000 and abs(power) <= 64:
            return float(base**power) if isinstance(base**power, float) else int(base**power)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_calculate(node.operand)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        functions: dict[str, Callable[..., float]] = {"int": int, "round": round, "max": max, "min": min, "abs": abs, "float": float}
        if node.func.id in functions:
            return functions[node.func.id](*map(_calculate, node.args))
    raise ValueError(ast.dump(node))


def python_code(code: str) -> Result:
    """The output of ``python -c 'print(<arithmetic>)'``."""
    if MARK.search(code):
        return _UNKNOWN
    try:
        body = ast.parse(code.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _UNKNOWN
    statement = body[0] if len(body) == 1 else None
    if (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) and not statement.value.keywords
            and isinstance(statement.value.func, ast.Name) and statement.value.func.id == "print"):
        try:
            return " ".join(str(_calculate(arg)) for arg in statement.value.args) + "\n", 0
        except (ValueError, ArithmeticError, TypeError):
            return _UNKNOWN
    return _UNKNOWN


def _expr(shell: Shell, args: list[str], stdin: str | None) -> Result:
    if len(args) == 3 and args[1] in ("+", "-", "*", "/", "%") and all(re.fullmatch(r"-?\d+", args[i]) for i in (0, 2)):
        left, right = int(args[0]), int(args[2])
        if args[1] in ("/", "%") and right == 0:
            return "", 2
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1) if right else 0
        value = {"+": left + right, "-": left - right, "*": left * right, "/": quotient, "%": left - right * quotient}[args[1]]
        return f"{value}\n", 0 if value else 1
    return _UNKNOWN


def _bc(shell: Shell, args: list[str], stdin: str | None) -> Result:
    text = (stdin or "").strip()
    if args or not re.fullmatch(r"[\d\s()+*-]+|\(?\d+\s*/\s*\d+\)?", text):
        return _UNKNOWN
    try:
        return f"{int(_calculate(ast.parse(text.replace('/', '//'), mode='eval').body))}\n", 0
    except (SyntaxError, ValueError, ArithmeticError, TypeError, RecursionError):
        return _UNKNOWN


def _single(shell: Shell, args: list[str], stdin: str | None) -> Result:
    """A program that prints one word, not known here."""
    return shell.world.marks.mark(Unknown(f"command substitution {shell.substitution}", shell.substitution, shell.where())) + "\n", 0


def _date(shell: Shell, args: list[str], stdin: str | None) -> Result:
    formats = [arg for arg in args if arg.startswith("+")]
    if formats and not re.search(r"\s|%[cnrtx]", formats[0]):
        return _single(shell, args, stdin)
    return _UNKNOWN


def _tee(shell: Shell, args: list[str], stdin: str | None) -> Result:
    for name in args:
        if not name.startswith("-"):
            shell.write_file(name, stdin, append="-a" in args)
    return stdin, 0


def _quiet(shell: Shell, args: list[str], stdin: str | None) -> Result:
    return "", None


UTILITIES: dict[str, Callable[[Shell, list[str], str | None], Result]] = {
    "cat": _cat, "dirname": _dirname, "basename": _basename, "realpath": _realpath, "readlink": _realpath, "pwd": _pwd, "seq": _seq,
    "wc": _wc, "tr": _tr, "cut": _cut, "grep": _grep, "egrep": lambda s, a, i: _grep(s, ["-E", *a], i), "sed": _sed, "head": _head,
    "tail": _tail, "sort": _sort, "awk": _awk, "gawk": _awk, "expr": _expr, "bc": _bc, "date": _date, "hostname": _single,
    "whoami": _single, "nproc": _single, "uuidgen": _single, "mktemp": _single, "id": _single, "shuf": _single, "uname": _single,
    "tee": _tee, "mkdir": _quiet, "cp": _quiet, "touch": _quiet, "sleep": _quiet, "chmod": _quiet, "ln": _quiet, "pip": _quiet,
}
