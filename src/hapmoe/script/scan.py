"""Reading words: quotes, expansions and substitutions become parts (own scanner, line numbers kept)."""

from __future__ import annotations

import re
from bisect import bisect_right

from hapmoe.errors import InputError

from .syntax import Arith, CommandSub, DoubleQuoted, Literal, Param, Part, ProcessSub, Program, Word

__all__ = ["Scanner"]

_META = frozenset(" \t\n;&|<>()")
_PLAIN = re.compile(r"[^ \t\n;&|<>()\\'\"$`?*+@!]+")
_DQ_PLAIN = re.compile(r'[^"\\$`]+')
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_PARAM_NAME = re.compile(r"[A-Za-z_]\w*|\d+|[@*#?$!-]", re.ASCII)
_ANSI = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b", "E": "\x1b"}
_DEEPEST = 60


class Scanner:
    """A position in a script's text. Subclassed by the parser, which reads the commands inside ``$( )``."""

    def __init__(self, text: str, file: str, first_line: int = 1, depth: int = 0) -> None:
        self.text, self.file, self.first_line, self.depth = text, file, first_line, depth
        self.pos = 0
        self.end = len(text)
        self._newlines: list[int] | None = None

    # -- places ---------------------------------------------------------------------------------------------------

    def line(self, pos: int | None = None) -> int:
        if self._newlines is None:
            self._newlines = [match.start() for match in re.finditer("\n", self.text)]
        return self.first_line + bisect_right(self._newlines, (self.pos if pos is None else pos) - 1)

    def fail(self, what: str, line: int | None = None) -> InputError:
        line = self.line(min(self.pos, max(self.end - 1, 0))) if line is None else line
        rows = self.text.split("\n")
        row = rows[line - self.first_line] if 0 <= line - self.first_line < len(rows) else ""
        holder = re.search(r"<[A-Za-z][^<>|&;$]*>", row)
        hint = f"fill in the placeholder {holder.group()}" if holder else "check it with `bash -n`"
        return InputError(what, where=f"{self.file}:{line}", hint=hint)

    def peek(self, text: str) -> bool:
        return self.text.startswith(text, self.pos)

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise InputError("nested too deeply", where=f"{self.file}:{self.line()}", hint="simplify the script")

    # -- words ----------------------------------------------------------------------------------------------------

    def word(self, *, extglob: bool = False) -> Word | None:
        """The word at the position, or None where a metacharacter stands."""
        start = self.pos
        parts = self.parts_until(_META, extglob=extglob)
        if self.pos == start:
            return None
        return Word(tuple(parts), self.text[start : self.pos], self.line(start))

    def parts_until(self, stops: frozenset[str], *, extglob: bool = False, braces: bool = False) -> list[Part]:
        """Parts up to an unquoted character of ``stops`` (kept for the caller)."""
        parts: list[Part] = []
        text, end = self.text, self.end
        plain: list[str] = []

        def flush() -> None:
            if plain:
                parts.append(Literal("".join(plain)))
                plain.clear()

        while self.pos < end:
            char = text[self.pos]
            if char in "<>" and not parts and not plain and stops is _META and text.startswith("(", self.pos + 1):
                flush()
                parts.append(self._process_sub())
                continue
            if char in stops:
                break
            if char == "\\":
                if text.startswith("\n", self.pos + 1):
                    self.pos += 2
                    continue
                flush()
                parts.append(Literal(text[self.pos + 1 : self.pos + 2] or "\\", quoted=True))
                self.pos += 2
            elif char == "'":
                flush()
                parts.append(Literal(self._single_quoted(), quoted=True))
            elif char == '"':
                flush()
                parts.append(self._double_quoted())
            elif char == "$":
                part = self._dollar(quoted=False)
                if isinstance(part, str):
                    plain.append(part)
                else:
                    flush()
                    parts.append(part)
            elif char == "`":
                flush()
                parts.append(self._backquoted(quoted=False))
            elif extglob and char in "?*+@!" and text.startswith("(", self.pos + 1):
                plain.append(self._extglob())
            else:
                match = _PLAIN.match(text, self.pos) if not braces else None
                plain.append(match.group() if match else char)
                self.pos = match.end() if match else self.pos + 1
        flush()
        return parts

    def _extglob(self) -> str:
        start, level = self.pos, 0
        while self.pos < self.end:
            char = self.text[self.pos]
            self.pos += 1
            if char == "(":
                level += 1
            elif char == ")":
                level -= 1
                if level == 0:
                    break
        return self.text[start : self.pos]

    def _single_quoted(self) -> str:
        close = self.text.find("'", self.pos + 1)
        if close < 0:
            raise self.fail("a single quote is not closed", self.line())
        body = self.text[self.pos + 1 : close]
        self.pos = close + 1
        return body

    def _double_quoted(self) -> DoubleQuoted:
        line = self.line()
        self.pos += 1
        parts = self.quoted_parts('"')
        if not self.peek('"'):
            raise self.fail("a double quote is not closed", line)
        self.pos += 1
        return DoubleQuoted(tuple(parts))

    def quoted_parts(self, stop: str) -> list[Part]:
        """Parts inside double quotes, a here-document (no stop) or a quoted ``${x:-...}`` (stop ``}``)."""
        parts: list[Part] = []
        plain: list[str] = []
        text = self.text
        while self.pos < self.end:
            char = text[self.pos]
            if char == stop:
                break
            if char == "\\":
                following = text[self.pos + 1 : self.pos + 2]
                if following and (following in "$`\\" or (following in (stop, '"') and (stop or following != '"'))):
                    plain.append(following)
                elif following != "\n":
                    plain.append("\\" + following)
                self.pos += 2
            elif char in "$`" or (char == '"' and stop == "}"):
                if char == '"':
                    part: Part | str = self._double_quoted()
                else:
                    part = self._dollar(quoted=True) if char == "$" else self._backquoted(quoted=True)
                if isinstance(part, str):
                    plain.append(part)
                else:
                    if plain:
                        parts.append(Literal("".join(plain), quoted=True))
                        plain = []
                    parts.append(part)
            elif stop == '"':
                match = _DQ_PLAIN.match(text, self.pos)
                assert match
                plain.append(match.group())
                self.pos = match.end()
            else:
                plain.append(char)
                self.pos += 1
        if plain:
            parts.append(Literal("".join(plain), quoted=True))
        return parts

    # -- dollars --------------------------------------------------------------------------------------------------

    def _dollar(self, *, quoted: bool) -> Part | str:
        start, text = self.pos, self.text
        following = text[start + 1 : start + 2]
        if following == "'" and not quoted:
            return self._ansi_quoted()
        if following == '"' and not quoted:
            self.pos += 1
            return self._double_quoted()
        if following == "(":
            if text.startswith("((", start + 1):
                arith = self._arith(start)
                if arith is not None:
                    return arith
            return self._command_sub(start)
        if following == "{":
            return self._braced(start, quoted=quoted)
        if following == "[":
            close = text.find("]", start)
            if close > 0:
                self.pos = close + 1
                return Arith(self._sub_parts(text[start + 2 : close]), text[start : self.pos])
        match = _NAME.match(text, start + 1) or re.compile(r"[0-9@*#?$!-]").match(text, start + 1)
        if not match:
            self.pos += 1
            return "$"
        self.pos = match.end()
        return Param(match.group(), source=match.group() and text[start : self.pos])

    def _ansi_quoted(self) -> Literal:
        self.pos += 2
        out: list[str] = []
        text = self.text
        while self.pos < self.end and text[self.pos] != "'":
            char = text[self.pos]
            self.pos += 1
            if char != "\\":
                out.append(char)
                continue
            code = re.compile(r"x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|U([0-9a-fA-F]{1,8})|([0-7]{1,3})").match(
                text, self.pos
            )
            if code:
                self.pos = code.end()
                number = code.group(1) or code.group(2) or code.group(3)
                value = int(number, 16) if number else int(code.group(4), 8)
                out.append(chr(value) if value < 0xF0000 else "?")
            else:
                escaped = text[self.pos : self.pos + 1]
                self.pos += 1
                out.append(_ANSI.get(escaped, escaped if escaped in "\\'\"?" else "\\" + escaped))
        self.pos += 1
        return Literal("".join(out), quoted=True)

    def _arith(self, start: int) -> Arith | None:
        close = self.matching_parens(start + 3)
        if close is None:
            return None
        inner = self.text[start + 3 : close]
        self.pos = close + 2
        return Arith(self._sub_parts(inner), self.text[start : self.pos])

    def matching_parens(self, start: int) -> int | None:
        """Where the ``))`` stands that closes the ``((`` before ``start``; None when it is not arithmetic."""
        level, pos = 0, start
        while pos < self.end:
            char = self.text[pos]
            if char == "(":
                level += 1
            elif char == ")":
                if level == 0:
                    return pos if self.text.startswith("))", pos) else None
                level -= 1
            elif char == "\\":
                pos += 1
            elif char == "'" or (char == "#" and self.text[pos - 1] in "\n;"):
                return None
            pos += 1
        return None

    def _sub_parts(self, inner: str) -> tuple[Part, ...]:
        """Parts of text read as if inside double quotes, with the quotes themselves dropped."""
        scanner = self.again(inner)
        parts: list[Part] = []
        while scanner.pos < scanner.end:
            parts += scanner.quoted_parts('"')
            scanner.pos += 1
        return tuple(parts)

    def again(self, text: str) -> Scanner:
        """A scanner of the same kind on a piece of this text."""
        self.deeper()
        made = type(self)(text, self.file, self.line(), self.depth)
        self.depth -= 1
        return made

    def _command_sub(self, start: int) -> CommandSub:
        line = self.line()
        self.pos = start + 2
        body = self.commands_until_paren(line)
        return CommandSub(body, self.text[start : self.pos], line, self.text[start + 2 : self.pos - 1])

    def _process_sub(self) -> ProcessSub:
        start = self.pos
        self.pos += 2
        body = self.commands_until_paren(self.line())
        return ProcessSub(body, self.text[start : self.pos], self.text[start] == "<")

    def commands_until_paren(self, line: int) -> Program:
        raise NotImplementedError

    def _backquoted(self, *, quoted: bool) -> CommandSub:
        start, line = self.pos, self.line()
        pos = start + 1
        out: list[str] = []
        while pos < self.end and self.text[pos] != "`":
            if self.text[pos] == "\\" and self.text[pos + 1 : pos + 2] in ("`", "\\", "$", *(('"',) if quoted else ())):
                pos += 1
            out.append(self.text[pos])
            pos += 1
        if pos >= self.end:
            raise self.fail("a backquote is not closed", line)
        self.pos = pos + 1
        return CommandSub(None, self.text[start : self.pos], line, "".join(out))

    def _braced(self, start: int, *, quoted: bool) -> Param:
        line = self.line()
        self.deeper()
        self.pos = start + 2
        length = self.peek("#") and not re.compile(r"#(?:\}|[:%/^,=+?-])").match(self.text, self.pos)
        self.pos += length
        indirect = self.peek("!") and not re.compile(r"!(?:\}|[:%/^,=+?-])").match(self.text, self.pos)
        self.pos += indirect
        match = _PARAM_NAME.match(self.text, self.pos)
        if not match:
            raise self.fail("a bad ${...} substitution", line)
        self.pos = match.end()
        index = self.subscript() if self.peek("[") else None
        op, arg, second = self._operator(quoted)
        if not self.peek("}"):
            raise self.fail("a ${...} is not closed or not understood", line)
        self.pos += 1
        self.depth -= 1
        return Param(match.group(), index, op, arg, second, bool(length), bool(indirect), self.text[start : self.pos])

    def _operator(self, quoted: bool) -> tuple[str, tuple[Part, ...], tuple[Part, ...] | None]:
        match = re.compile(r":[-=+?]|[-=+?]|##?|%%?|//|/#|/%|/|\^\^?|,,?|:|@[A-Za-z]|[@*](?=\})").match(
            self.text, self.pos
        )
        if not match:
            return "", (), None
        op = match.group()
        self.pos = match.end()
        if op[0] == "@" or op == "*":
            return op, (), None
        if op[0] == "/":
            slash: tuple[Part, ...] = ()
            if op == "//" and self.peek("/"):  # ${x////_}: a slash right behind // is the pattern's own
                self.pos += 1
                slash = (Literal("/"),)
            arg = slash + self._brace_arg("/}", quoted=False)
            if not self.peek("/"):
                return op, arg, ()
            self.pos += 1
            return op, arg, self._brace_arg("}", quoted=False)
        if op == ":":
            arg = self._brace_arg(":}", quoted=True)
            if not self.peek(":"):
                return op, arg, None
            self.pos += 1
            return op, arg, self._brace_arg("}", quoted=True)
        substitutes = op.lstrip(":") in "-=+?"
        return op, self._brace_arg("}", quoted=quoted and substitutes), None

    def _brace_arg(self, stops: str, *, quoted: bool) -> tuple[Part, ...]:
        if quoted and stops == "}":
            return tuple(self.quoted_parts("}"))
        if quoted:
            return self._offset_arg(stops)
        return tuple(self.parts_until(frozenset(stops), braces=True))

    def _offset_arg(self, stops: str) -> tuple[Part, ...]:
        """An offset runs to ``:`` or ``}``, but the ``:`` of ``a ? b : c`` and of nested ``${x:-y}`` is its own."""
        return tuple(self.parts_until(frozenset(stops), braces=True))

    def subscript(self) -> str:
        """The source between brackets at the position; the brackets are consumed."""
        start, level, pos = self.pos + 1, 0, self.pos
        while pos < self.end:
            char = self.text[pos]
            if char == "\\":
                pos += 1
            elif char in "'\"":
                close = self.text.find(char, pos + 1)
                pos = close if close > 0 else self.end
            elif char == "[":
                level += 1
            elif char == "]":
                level -= 1
                if level == 0:
                    self.pos = pos + 1
                    return self.text[start:pos]
            pos += 1
        raise self.fail("a [ is not closed")
