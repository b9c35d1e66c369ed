"""An argument vector cut into flags and their values, as Megatron's argparse cuts it.

Megatron's parser has no positionals and ``allow_abbrev=False`` (arguments.py:120): names match
exactly, ``--flag=value`` is accepted, a word that starts with ``-`` is a flag unless it is a
negative number or holds a space, and of a repeated flag the last occurrence counts.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from hapmoe.errors import InputError
from hapmoe.job import Argument
from hapmoe.script.arity import ARITY, MAIN_LACKS
from hapmoe.script.flags import BY_NAME, REJECTED, Flag, arity_of, find_flag
from hapmoe.script.values import Token

__all__ = ["Occurrence", "argument", "argv_notes", "own", "parse_argv"]

_NEGATIVE = re.compile(r"-\d+$|-\d*\.\d+$")
_INLINE = re.compile(r"(--[A-Za-z][\w.-]*)=")
_SHOWN = 8
_COMPARED = 200
"""Unknown names that are held against known ones: more are no slip of the keyboard."""


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One flag as it stands in the arguments, with the words that belong to it."""

    name: str
    """As written, without ``=value``; empty: words that belong to no flag."""
    spelling: str
    """The name Megatron knows; differs where a fork writes underscores."""
    flag: Flag | None
    values: tuple[Token, ...]
    first: int
    """Position of the first word in the vector."""
    count: int
    """Words in the vector."""
    where: str

    @property
    def line(self) -> str:
        """Where the value was given, else the flag."""
        return next((value.where for value in self.values if value.where), self.where)


def argument(token: Token, owner: str = "user") -> Argument:
    """A word of the script as a word of the job."""
    return Argument(text=token.text, why=token.why, source=token.source, where=token.where, owner=owner)


def parse_argv(argv: Sequence[Token]) -> tuple[Occurrence, ...]:
    """Flags and their words, in order; every word belongs to exactly one occurrence.

    Raises InputError for a word that is not known and could itself be a flag.
    """
    found: list[Occurrence] = []
    at = 0
    while at < len(argv):
        occurrence = _next(argv, at)
        found.append(occurrence)
        at += occurrence.count
    return tuple(found)


def _next(argv: Sequence[Token], at: int) -> Occurrence:
    token = argv[at]
    inline = _INLINE.match(token.text if token.text is not None else token.source.lstrip("\"'"))
    if inline:
        name = inline.group(1)
        # The part after "=" of a word that is partly unknown is not known either.
        rest = None if token.text is None else token.text[inline.end() :]
        value = Token(rest, token.why, token.source, token.where)
        flag, spelling = find_flag(name)
        return Occurrence(name, spelling, flag, (value,), at, 1, token.where)
    if token.text is None and _may_be_flag(token):
        raise InputError(
            f"a word of the arguments is not known before the run ({token.why or token.source}) and may be a flag",
            where=token.where,
            hint="give the variables it needs with --env NAME=VALUE",
        )
    if token.text is None or not _is_flag(token):
        return Occurrence("", "", None, (token,), at, 1, token.where)
    name = token.text
    arity = arity_of(name)
    limit = arity if isinstance(arity, int) else len(argv)
    end = at + 1
    # A known switch takes nothing in Megatron, but forks give some of them "True".
    if arity == 0 and end < len(argv) and (argv[end].text or "").lower() in _BOOLEANS:
        limit = 1
    while end < len(argv) and end - at <= limit and not _is_flag(argv[end]):
        end += 1
    flag, spelling = find_flag(name)
    return Occurrence(name, spelling, flag, tuple(argv[at + 1 : end]), at, end - at, token.where)


_BOOLEANS = ("true", "false")


def _may_be_flag(token: Token) -> bool:
    """Could a word that only a run would tell be a flag of a planner's?"""
    if "secret" in token.why:  # "--wandb-api-key=..." and the like
        return False
    return token.source.lstrip("\"'")[:1] in ("", "$", "`", "-")


def _is_flag(token: Token) -> bool:
    """argparse's rule, given that no Megatron flag looks like a negative number."""
    text = token.text
    if text is None:
        return bool(_INLINE.match(token.source.lstrip("\"'")))
    return len(text) > 1 and text[0] == "-" and not _NEGATIVE.match(text) and (" " not in text or "=" in text)


def own(argv: Sequence[Token], occurrences: Iterable[Occurrence], also: Iterable[str] = ()) -> tuple[Argument, ...]:
    """The vector as the job keeps it, every word marked as the user's or the plan's.

    ``also``: keys that belong to the plan in this job although they are the user's in general.
    """
    plan_keys = set(also)
    kept: list[Argument] = []
    for occurrence in occurrences:
        flag = occurrence.flag
        owner = "plan" if flag and (flag.plan or flag.key in plan_keys) else "user"
        words = argv[occurrence.first : occurrence.first + occurrence.count]
        kept += [argument(word, owner) for word in words]
    return tuple(kept)


def argv_notes(occurrences: Sequence[Occurrence]) -> tuple[str, ...]:
    """What is odd about the arguments as such, in plain words."""
    notes: list[str] = []
    last: dict[str, Occurrence] = {}
    for occurrence in occurrences:
        notes += _odd(occurrence)
        if not occurrence.name:
            continue
        key = occurrence.flag.key if occurrence.flag else occurrence.spelling
        before = last.get(key)
        if before and [value.text for value in before.values] != [value.text for value in occurrence.values]:
            notes.append(
                f"{occurrence.name} is given more than once: {_place(before)} is overridden by {_place(occurrence)}"
            )
        last[key] = occurrence
    return (*notes, *_unknown_names(occurrences))


def _place(occurrence: Occurrence) -> str:
    words = " ".join(value.text if value.text is not None else "?" for value in occurrence.values)
    return " ".join(part for part in (words, f"({occurrence.line})" if occurrence.line else "") if part)


def _odd(occurrence: Occurrence) -> list[str]:
    name, spelling, flag, where = occurrence.name, occurrence.spelling, occurrence.flag, occurrence.where
    notes = []
    if not name and occurrence.values[0].text is not None:
        word = occurrence.values[0].text
        notes.append(f"{where}: {word!r} belongs to no flag; Megatron would stop with 'unrecognized arguments'")
    if name in REJECTED:
        notes.append(f"{where}: Megatron today refuses {name}; its name is {REJECTED[name]}")
    elif name in MAIN_LACKS:
        notes.append(f"{where}: {name} is of an older release; Megatron main does not know it")
    elif flag and name not in ARITY and name == spelling:
        of = "of a fork" if name == flag.names[0] else f"a fork's name for {flag.names[0]}"
        notes.append(f"{where}: {name} is {of}; Megatron does not know it")
    if spelling != name:
        notes.append(f"{where}: {name} is read as {spelling}; Megatron itself knows only the latter")
    if flag and flag.arity == 0 and occurrence.values:
        notes.append(f"{where}: {name} takes no value in Megatron")
    return notes


def _unknown_names(occurrences: Iterable[Occurrence]) -> list[str]:
    unknown: dict[str, str] = {}
    for occurrence in occurrences:
        if occurrence.name and occurrence.flag is None and occurrence.name not in ARITY:
            unknown.setdefault(occurrence.name, occurrence.where)
    if not unknown:
        return []
    notes = []
    for name, where in islice(unknown.items(), _COMPARED):
        close = difflib.get_close_matches(name, BY_NAME, n=1, cutoff=0.9)
        if close:
            notes.append(f"{where}: {name} is not a Megatron flag; is {close[0]} meant?")
    shown = ", ".join(list(unknown)[:_SHOWN]) + (f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else "")
    return [*notes, f"kept as they are, not of Megatron's own parser (up to main of 2026-08): {shown}"]
