"""Arguments and text streams of the small programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .interpret import Shell

__all__ = ["UNKNOWN", "Result", "input_text", "joined", "lines_of", "split_args"]

Result = tuple[str | None, int | None]
UNKNOWN: Result = (None, None)


def split_args(args: list[str], valued: str = "", *, joined: str = "") -> tuple[dict[str, str], list[str]] | None:
    """Short options (those in ``valued`` take a value, the last counts, or all in lines for those
    in ``joined``) and operands; None on an option that is not simple."""
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
                value = letters or (pending.pop(0) if pending else "")
                options[letter] = f"{options[letter]}\n{value}" if letter in joined and letter in options else value
                break
            options[letter] = ""
    return options, operands


def input_text(shell: Shell, files: list[str], stdin: str | None) -> str | None:
    if not files:
        return stdin
    texts = [stdin if name == "-" else shell.read_file(name) for name in files]
    return None if None in texts else "".join(text for text in texts if text is not None)


def lines_of(text: str) -> list[str]:
    return text[:-1].split("\n") if text.endswith("\n") else text.split("\n") if text else []


def joined(lines: list[str]) -> str:
    return "".join(line + "\n" for line in lines)
