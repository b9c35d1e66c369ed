"""Files as the script sees them: those it writes are held in memory, those beside it are read, others are not known."""

from __future__ import annotations

import glob
import os.path
import re
from pathlib import Path
from typing import TYPE_CHECKING

from .control import Control
from .patterns import matches
from .values import MARK, Text, Unknown

if TYPE_CHECKING:
    from .interpret import Shell

__all__ = ["absolute", "exists", "matching", "on_disk", "read", "source_of", "write"]

_LARGEST = 1_000_000


def absolute(shell: Shell, text: str) -> str:
    """``text`` as an absolute, normal path (it may hold unknowns)."""
    path = text if text.startswith("/") or MARK.match(text) else f"{shell.state.cwd}/{text}"
    if MARK.search(path) and ".." in path.split("/"):
        real = shell.world.marks.real_path(path)
        source = f'$(realpath -m "{source_of(shell, path)}")'
        if real is None:
            return shell.world.marks.derive(path, "", source, shell.where(), nonempty=True)
        return shell.world.marks.mark(
            Unknown("a folder of the machine it runs on", source, stable=True, path=os.path.normpath(real))
        )
    path = os.path.normpath(path)
    return "/" + path.lstrip("/") if path.startswith("//") else path


def _real(shell: Shell, text: str) -> Path | None:
    """Where a file would stand on this machine, when that is known."""
    real = shell.world.marks.real_path(absolute(shell, text))
    return Path(real) if real and "\0" not in real else None


def on_disk(shell: Shell, text: str) -> Path | None:
    """The existing file that ``text`` names: as the shell would find it, else beside the script."""
    real = _real(shell, text)
    if real is not None and _is_file(real):
        return real
    at_start = shell.world.marks.real_path(shell.state.cwd) == str(shell.world.start)
    if real is not None and at_start and not text.startswith("/") and not MARK.search(text):
        beside = shell.world.folder / text
        if _is_file(beside):
            return beside
    return None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _near(shell: Shell, path: Path) -> bool:
    return any(path.is_relative_to(root) for root in (shell.world.folder, shell.world.start) if str(root) != "/")


def read(shell: Shell, name: str) -> str | None:
    """A file's text; None when it is not known."""
    key = absolute(shell, name)
    if key in shell.state.files:
        return shell.state.files[key]
    if name == "/dev/null":
        return ""
    if name in ("/dev/stdin", "-"):
        return shell.state.stdin
    path = on_disk(shell, name)
    if path is None or not _near(shell, path):
        return None
    try:
        if path.stat().st_size > _LARGEST:
            return None
        return MARK.sub("?", path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write(shell: Shell, name: str, text: str | None, *, append: bool = False) -> None:
    if name.startswith("/dev/"):
        return
    key = absolute(shell, name)
    if append:
        before = (
            shell.state.files[key]
            if key in shell.state.files
            else (read(shell, name) if on_disk(shell, name) else None)
        )
        text = None if before is None or text is None else before + text
    shell.state.files[key] = text


def exists(shell: Shell, name: str, op: str) -> bool | None:
    """A file test: True for a file that the script wrote or that stands beside it, else not known."""
    key = absolute(shell, name)
    if key in shell.state.files and op != "-d":
        text = shell.state.files[key]
        return None if text is None else op != "-s" or bool(text)
    path = on_disk(shell, name)
    if path is not None and _near(shell, path) and op != "-d":
        return True if op != "-s" else None
    if op == "-d" and name in ("/", ".", "..", "/tmp", "/dev"):
        return True
    shell.tested.add(key)
    return None


def matching(shell: Shell, text: str, active: str, where: str) -> list[Text]:
    """The files an unquoted pattern matches. ``active`` is ``text`` with its quoted characters blanked."""
    strict = shell.state.options & {"nullglob", "failglob"}
    if not re.search(r"[*?]|\[.+\]", active):
        return [Text(text, where)]
    if not strict and (text.startswith("-") or "://" in text):
        return [Text(text, where)]
    if not strict and not re.search(r"/", text) and re.search(r"[()|+{}]", text):
        return [Text(text, where)]  # an expression such as ([0]*3+[1]*45), not a file's name
    head = re.split(r"[*?\[]", active)[0]
    folder = text[: len(head)].rpartition("/")[0] + ("/" if "/" in head else "")
    real = _real(shell, folder or ".")
    if real is not None and _near(shell, real) and real.is_dir() and not MARK.search(text[len(folder) :]):
        pattern = "".join(
            char if mask != "\0" else glob.escape(char)
            for char, mask in zip(text[len(folder) :], active[len(folder) :], strict=True)
        )
        found = sorted(glob.glob(pattern, root_dir=real)) if len(pattern) < 1000 else []
        written = _written(shell, folder, active[len(folder) :])
        if written is None or (not found and not written and shell.world.outside and re.search(r"[./]", active)):
            return [_unknown_files(shell, text, where)]
        found = sorted({*found, *written})
        if found:
            return [Text(folder + name, where) for name in found]
        if "failglob" in strict:
            shell.world.notes.append(f"{where}: no match: {text}")
            shell.state.status = 1
            raise Control("abort")
        if strict:
            return []
        return [Text(text, where)]
    return [_unknown_files(shell, text, where)]


def _unknown_files(shell: Shell, text: str, where: str) -> Text:
    why = f"the files that match {MARK.sub('?', text)}"
    return Text(shell.world.marks.mark(Unknown(why, MARK.sub("?", text), where, single=False, spread=True)), where)


def _written(shell: Shell, folder: str, pattern: str) -> list[str] | None:
    """The files under ``folder`` that the script itself wrote and that match ``pattern``; None when it is not certain
    that they are there."""
    base = absolute(shell, folder or ".").rstrip("/") + "/"
    names = []
    for path, text in shell.state.files.items():
        if path.startswith(base):
            name = path[len(base) :]
            depth = name.count("/") == pattern.count("/")
            if depth and all(map(_part_matches, name.split("/"), pattern.split("/"))):
                if text is None or "\0" in pattern:
                    return None
                names.append(name)
    return names


def _part_matches(name: str, pattern: str) -> bool:
    return matches(name, pattern.replace("\0", "?")) and (not name.startswith(".") or pattern.startswith("."))


def source_of(shell: Shell, text: str) -> str:
    """Shell source, for inside double quotes, that gives ``text``."""

    def known(piece: str) -> str:
        return re.sub(r'([\\"$`])', r"\\\1", piece)

    pieces = MARK.split(text)
    unknowns = shell.world.marks.of(text)
    out = [known(pieces[0])]
    for unknown, piece in zip(unknowns, pieces[1:], strict=True):
        out += [unknown.source, known(piece)]
    return "".join(out)
