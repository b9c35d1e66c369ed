"""The nouns of script reading: what a launch script hands to the training entry.

Inside the interpreter a string is a plain ``str`` in which every piece that is not known statically stands as one
*mark*: a private-use character that names an :class:`Unknown`. Joining strings then needs no special case, a known
prefix such as ``--save=`` survives, and "is this known?" is one regular-expression search.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from hapmoe.errors import InputError

__all__ = [
    "MARK",
    "Invocation",
    "Marks",
    "Text",
    "Token",
    "Unknown",
    "holds_secret",
    "is_secret_flag",
    "is_secret_name",
    "without_secrets",
]

MARK = re.compile("[\U000f0000-\U0010fffd]")
_FIRST_MARK = 0xF0000
_MOST_MARKS = 60_000

# A secret is named by a whole word: HF_TOKEN yes; TRAIN_TOKENS, TOKENIZER_TYPE no. A bare `key` is a loop variable.
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:AUTH)?TOKEN(?:_|$)|[A-Z0-9]_?KEYS?(?:_|$)|PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIAL|APIKEY"
    r"|^MYSQL_PWD$"
)
_NOT_SECRET = re.compile(
    r"MONKEY|TURKEY|KEYS?_VALUE|JSON_KEYS?|QUERY_KEY|(?:SPECIAL|PAD|MASK|PER|EOS|BOS|EOD|UNK|SEP|CLS|IMAGE|VIDEO|AUDIO|FIM|PREFIX|SUFFIX|MIDDLE|START|END|STOP|MAX|NUM|MOE)_TOKEN"
    r"|TOKEN_(?:ID|DROP|DISPATCHER|LEVEL|TYPE|COUNT|NUM|BUDGET|LIMIT|LEN)"
)
_SECRET_FLAG = re.compile(
    r"(?:^|_)(?:(?:API|ACCESS|SECRET|PRIVATE|AUTH|WANDB|SWANLAB|HF|COMET|AWS|SSH|OPENAI)_?KEY(?:_ID)?|TOKEN"
    r"|PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIALS?|APIKEY)$|^TOKEN$"
)
# Prefixes that services give their keys, and the places of a URL, header or file where a credential stands.
_SECRET_TEXT = re.compile(
    r"://[^/\s:@]*:[^/\s@]+@|(?:^|[^A-Za-z0-9])(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|github_pat_\w{20,}|glpat-[\w-]{10,}|nvapi-[\w-]{10,}|xox[abeoprs]-[\w-]{10,}|A[KS]IA[A-Z0-9]{16}|AIza[\w-]{30,}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.)|://[^/\s:@]{20,}@|hooks\.slack\.com/services/\S"
    r"|Authorization:\s*(?:\w+\s+)?\S|\bBearer\s+[\w.=+/-]{8,}|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|[?&][\w-]*(?:token|key|secret|signature|sig|password|credential)[\w-]*=[^&\s]",
    re.IGNORECASE,
)
_SECRET_WORDS = re.compile(f"(?:{_SECRET_TEXT.pattern})\\S*", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a credential.

    >>> [is_secret_name(n) for n in ("HF_TOKEN", "WANDB_API_KEY", "TRAIN_TOKENS", "TOKENIZER_TYPE", "key")]
    [True, True, False, False, False]
    """
    upper = name.upper()
    return bool(_SECRET_NAME.search(upper)) and not _NOT_SECRET.search(upper)


def is_secret_flag(flag: str) -> bool:
    """Whether the value of this option is a credential.

    >>> [is_secret_flag(f) for f in ("--wandb-api-key", "--moe-token-dispatcher-type", "--num-key-value-heads")]
    [True, False, False]
    """
    name = flag.lstrip("-").replace("-", "_").upper()
    return flag.startswith("-") and bool(_SECRET_FLAG.search(name)) and not _NOT_SECRET.search(name)


def holds_secret(text: str) -> bool:
    """Whether ``text`` shows a credential by itself: ``user:password@`` in a URL, or a well-known kind of key."""
    return bool(_SECRET_TEXT.search(text))


def without_secrets(text: str) -> str:
    """``text`` for a message: what shows a credential left out."""
    return _SECRET_WORDS.sub("***", text)


@dataclass(frozen=True, slots=True)
class Token:
    """One word of an argument vector, and the script word that gave it."""

    text: str | None
    """The word; None when it is not known statically."""
    why: str = ""
    """When unknown: the reason, e.g. ``command substitution $(date +%s)``."""
    source: str = ""
    """Shell source that gives this word again on another run; never a secret."""
    where: str = ""
    """``train.sh:12`` of the word that gave the value."""


@dataclass(frozen=True, slots=True)
class Invocation:
    """The training launch of a script: the entry, its whole argument vector, and the launch around it."""

    script: str
    entry: Token | None
    argv: tuple[Token, ...]
    launcher: str
    launcher_argv: tuple[Token, ...]
    world_size: int | None
    nodes: int | None
    devices_per_node: int | None
    env: tuple[tuple[str, Token], ...]
    """Variables the script exports, as they are at the launch, in order of first export."""
    unset: tuple[str, ...]
    """Variables read while unset, each as ``name (train.sh:12)``."""
    where: str
    python: tuple[str, ...] = ()
    """Interpreter words before the entry, e.g. ``("python", "-u")``."""
    program: str = ""
    """The entry from the folder the script is started in, where its text is not known for the folder alone; of a
    folder that is not known here either, the file's name."""


class Text(NamedTuple):
    """A string and the script word that gave it."""

    text: str
    where: str = ""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A piece of text that only a run would tell."""

    why: str
    source: str = ""
    where: str = ""
    single: bool = True
    """Holds no white space, so it stays one word when unquoted."""
    nonempty: bool = True
    stable: bool = False
    """The same text wherever it is read in one run, e.g. the working directory."""
    branch: str = ""
    """Differs between the two ways of a condition that is not known: the line of that condition."""
    secret: bool = False
    spread: bool = False
    """Stands unquoted and may be any number of words, also none."""
    many: bool = False
    """The elements of an array, or arguments."""
    path: str = field(default="", compare=False)
    """What it is on this machine, used only to find files and never shown."""


class Marks:
    """The unknowns of one reading, each behind one character."""

    def __init__(self) -> None:
        self._all: list[Unknown] = []
        self._index: dict[Unknown, str] = {}

    def mark(self, unknown: Unknown) -> str:
        """The character that stands for ``unknown``; equal unknowns share one."""
        found = self._index.get(unknown)
        if found is None:
            if len(self._all) >= _MOST_MARKS:
                raise InputError("too many values that are not known", where=unknown.where)
            found = chr(_FIRST_MARK + len(self._all))
            self._all.append(unknown)
            self._index[unknown] = found
        return found

    def of(self, text: str) -> list[Unknown]:
        """The unknowns in ``text``, in order."""
        return [self._all[ord(char) - _FIRST_MARK] for char in MARK.findall(text)]

    def derive(
        self, text: str, why: str, source: str, where: str, *, single: bool | None = None, nonempty: bool = False
    ) -> str:
        """A mark for what an operation makes of ``text``, which holds unknowns."""
        parts = self.of(text)
        return self.mark(
            Unknown(
                why=next((part.why for part in parts), why),
                source=source,
                where=where,
                single=all(part.single for part in parts) if single is None else single,
                nonempty=nonempty,
                branch=next((part.branch for part in parts if part.branch), ""),
                secret=any(part.secret for part in parts),
            )
        )

    def emptiness(self, text: str) -> bool | None:
        """Whether ``text`` is empty: True, False, or None when a run would tell."""
        if not text:
            return True
        if MARK.sub("", text) or any(part.nonempty for part in self.of(text)):
            return False
        return None

    def real_path(self, text: str) -> str | None:
        """``text`` with every unknown replaced by what it is here, or None where that is not known either."""
        paths = [part.path for part in self.of(text)]
        if not all(paths):
            return None
        remaining = iter(paths)
        return MARK.sub(lambda _: next(remaining), text)
