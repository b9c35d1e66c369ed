"""Between the words: blanks, comments, newlines with their here-documents, and reserved words."""

from __future__ import annotations

import re

from .scan import Scanner
from .syntax import Literal, Redirect, Word

__all__ = ["RESERVED", "Lines"]

_BLANK = re.compile(r"(?:[ \t\r]|\\\r?\n)+")
_COMMENT = re.compile(r"#[^\n]*")
RESERVED = re.compile(
    r"(if|then|elif|else|fi|for|while|until|do|done|case|esac|function|select|coproc|time|in|\{|\}|!|\[\[)(?=[\s;&|()<>]|$)"
)


class Lines(Scanner):
    """A scanner that knows about lines."""

    def __init__(self, text: str, file: str, first_line: int = 1, depth: int = 0) -> None:
        super().__init__(text, file, first_line, depth)
        self._heredocs: list[tuple[Redirect, bool]] = []

    # -- space ----------------------------------------------------------------------------------------------------

    def _blanks(self) -> None:
        match = _BLANK.match(self.text, self.pos)
        if match:
            self.pos = match.end()
        if self.peek("#"):
            comment = _COMMENT.match(self.text, self.pos)
            assert comment
            self.pos = comment.end()

    def _newline(self) -> None:
        self.pos += 1
        pending, self._heredocs = self._heredocs, []
        for redirect, strip in pending:
            self._heredoc_body(redirect, strip)

    def _newlines_and_blanks(self) -> None:
        while True:
            self._blanks()
            if not self.peek("\n"):
                return
            self._newline()

    def _heredoc_body(self, redirect: Redirect, strip: bool) -> None:
        quoted = any(part != Literal(getattr(part, "text", "")) for part in redirect.target.parts)
        stop = "".join(
            getattr(part, "text", "") or "".join(getattr(p, "text", "") for p in getattr(part, "parts", ()))
            for part in redirect.target.parts
        )
        line = self.line()
        rows: list[str] = []
        while self.pos < self.end:
            close = self.text.find("\n", self.pos)
            close = self.end if close < 0 else close
            row = self.text[self.pos : close]
            self.pos = min(close + 1, self.end)
            row = row.lstrip("\t") if strip else row
            if row == stop:
                break
            rows.append(row + "\n")
        body = "".join(rows)
        if quoted:
            redirect.target = Word((Literal(body, quoted=True),), "", line)
        else:
            inner = type(self)(body, self.file, line, self.depth + 1)
            redirect.target = Word(tuple(inner.quoted_parts("")), "", line)

    def _at(self, *enders: str) -> bool:
        match = RESERVED.match(self.text, self.pos)
        if match and match.group() in enders:
            return True
        return any(ender in (")", ";;", ";&", ";;&") and self.peek(ender) for ender in enders)

    def _expect(self, word: str) -> None:
        self._newlines_and_blanks()
        if not self.peek(word):
            found = (self.text[self.pos : self.pos + 20].split() or ["the end"])[0]
            raise self.fail(f"{word!r} is missing before {found!r}")
        self.pos += len(word)
