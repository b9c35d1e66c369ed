"""Reading commands: a recursive-descent parser for bash, one complete command at a time as bash itself reads."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hapmoe.errors import InputError

from .parse_lines import RESERVED
from .parse_tests import Conditions
from .syntax import (
    AndOr,
    ArithCommand,
    ArrayLiteral,
    Assign,
    Case,
    CFor,
    CondCommand,
    For,
    Function,
    Group,
    If,
    Item,
    Node,
    Pipeline,
    Program,
    Redirect,
    Redirected,
    Simple,
    Subshell,
    While,
    Word,
)

__all__ = ["Parser"]

_ASSIGN = re.compile(r"([A-Za-z_]\w*)(\+?=|\[)", re.ASCII)
_FUNCTION = re.compile(r"([^\s;&|<>()$'\"`=#\\{}]+)[ \t]*\([ \t]*\)")
_REDIRECT = re.compile(r"(\d+|\{[A-Za-z_]\w*\})?(<<<|<<-?|<>|<&|<|>>|>&|>\||&>>|&>|>)(?!\()")
_DECLARE = frozenset(("declare", "local", "export", "readonly", "typeset"))
_MOST_WORDS = 210_000
"""Linux starts no program with more: 2 MiB for words of two bytes at least and their pointers of 8 (execve(2))."""
_ENDERS = frozenset(("then", "elif", "else", "fi", "do", "done", "esac", "}"))


class Parser(Conditions):
    """Commands of a script."""

    def lines(self) -> Iterator[list[Item]]:
        """The commands of one line after another; an error in the text is raised when it is reached, as in bash."""
        while True:
            self._newlines_and_blanks()
            if self.pos >= self.end:
                return
            yield self._line_of_commands()

    def program(self) -> Program:
        return tuple(item for line in self.lines() for item in line)

    # -- lists ----------------------------------------------------------------------------------------------------

    def _line_of_commands(self) -> list[Item]:
        """Commands up to the end of the line (bash executes nothing of a line before it has read all of it)."""
        items = [self._item()]
        while True:
            self._blanks()
            if self.pos >= self.end or self.peek("\n"):
                if self.pos < self.end:
                    self._newline()
                return items
            if self.peek(")"):
                raise self.fail("a ) without its (")
            items.append(self._item())

    def _item(self) -> Item:
        line = self.line()
        node = self._and_or()
        self._blanks()
        background = False
        if self.peek("&") and not self.peek("&&"):
            background = True
            self.pos += 1
        elif self.peek(";") and not self.peek(";;") and not self.peek(";&"):
            self.pos += 1
        elif self.pos < self.end and self.text[self.pos] not in "\n);":
            raise self.fail(f"syntax error near {self.text[self.pos : self.pos + 20].split()[0]!r}")
        return Item(node, background, line)

    def _body(self, *enders: str, may_be_empty: bool = False) -> Program:
        """Commands up to one of the reserved words or operators in ``enders`` (kept for the caller); bash wants one
        at least, a comment is none."""
        self.deeper()
        line = self.line()
        items: list[Item] = []
        while True:
            self._newlines_and_blanks()
            if self.pos >= self.end:
                raise self.fail(f"the end of the file stands before {' or '.join(enders)}", line)
            if self._at(*enders) and (items or may_be_empty):
                break
            if self._at(*_ENDERS) or self.peek(")") or self.peek(";;") or self.peek(";&"):
                raise self.fail(f"syntax error near {self.text[self.pos : self.pos + 20].split()[0]!r}")
            items.append(self._item())
        self.depth -= 1
        return tuple(items)

    def commands_until_paren(self, line: int, *, may_be_empty: bool = True) -> Program:
        outer, self._heredocs = self._heredocs, []
        body = self._body(")", may_be_empty=may_be_empty)
        self._heredocs = outer
        self.pos += 1
        return body

    def _and_or(self) -> Node:
        line = self.line()
        first = self._pipeline()
        rest: list[tuple[str, Node]] = []
        while True:
            self._blanks()
            if not (self.peek("&&") or self.peek("||")):
                break
            op = self.text[self.pos : self.pos + 2]
            self.pos += 2
            self._newlines_and_blanks()
            rest.append((op, self._pipeline()))
        return AndOr(first, tuple(rest), line) if rest else first

    def _pipeline(self) -> Node:
        line = self.line()
        negated = False
        self._blanks()
        while self._at("!", "time"):
            negated ^= self.peek("!")
            self.pos += 1 if self.peek("!") else 4
            self._blanks()
            if self.peek("-p "):
                self.pos += 3
                self._blanks()
        commands = [self._command()]
        while True:
            self._blanks()
            if self.peek("||") or not self.peek("|"):
                break
            self.pos += 2 if self.peek("|&") else 1
            self._newlines_and_blanks()
            commands.append(self._command())
        return Pipeline(tuple(commands), negated, line) if negated or len(commands) > 1 else commands[0]

    # -- commands -------------------------------------------------------------------------------------------------

    def _command(self) -> Node:
        line = self.line()
        node = self._compound(line)
        if node is None:
            return self._simple(line)
        if isinstance(node, Function):
            return node
        redirects: list[Redirect] = []
        while self._redirect(redirects):
            pass
        return Redirected(node, tuple(redirects), line) if redirects else node

    def _compound(self, line: int) -> Node | None:
        if self.peek("(("):
            close = self.matching_parens(self.pos + 2)
            if close is not None:
                inner = self.text[self.pos + 2 : close]
                node = ArithCommand(Word(self._sub_parts(inner), inner, line), line)
                self.pos = close + 2
                return node
        if self.peek("("):
            self.pos += 1
            return Subshell(self.commands_until_paren(line, may_be_empty=False), line)
        match = RESERVED.match(self.text, self.pos)
        word = match.group() if match else ""
        if word in ("if", "while", "until", "for", "select", "case", "function", "{", "[["):
            self.pos += len(word)
            self.deeper()
            node2 = self._reserved(word, line)
            self.depth -= 1
            return node2
        if word == "coproc":
            raise InputError(
                "a coprocess (coproc) is not followed",
                where=f"{self.file}:{line}",
                hint="write what it gives into the script",
            )
        if word in _ENDERS:
            raise self.fail(f"syntax error near {word!r}")
        function = _FUNCTION.match(self.text, self.pos)
        if function:
            self.pos = function.end()
            return self._function(function.group(1), line)
        return None

    def _function(self, name: str, line: int) -> Function:
        self._newlines_and_blanks()
        body = self._command()
        if isinstance(body, (Simple, Function)):
            raise self.fail("the body of a function is no { } or other compound command", line)
        return Function(name, body, line)

    def _reserved(self, word: str, line: int) -> Node:
        if word == "if":
            return self._if(line)
        if word in ("while", "until"):
            condition = self._body("do")
            return While(condition, self._do_group(), word == "until", line)
        if word in ("for", "select"):
            return self._for(line, asks=word == "select")
        if word == "case":
            return self._case(line)
        if word == "[[":
            test = self._test_or()
            self._expect("]]")
            return CondCommand(test, line)
        if word == "{":
            body = self._body("}")
            self.pos += 1
            return Group(body, line)
        self._blanks()
        name = self.word()
        if name is None:
            raise self.fail("a function without a name")
        self._blanks()
        if self.peek("("):
            self.pos = self.text.index(")", self.pos) + 1
        return self._function(name.source, line)

    def _if(self, line: int) -> If:
        clauses = []
        otherwise: Program = ()
        while True:
            condition = self._body("then")
            self.pos += 4
            body = self._body("elif", "else", "fi")
            clauses.append((condition, body))
            if self.peek("elif"):
                self.pos += 4
                continue
            if self.peek("else"):
                self.pos += 4
                otherwise = self._body("fi")
            self.pos += 2
            return If(tuple(clauses), otherwise, line)

    def _do_group(self) -> Program:
        self._expect("do")
        body = self._body("done")
        self.pos += 4
        return body

    def _loop_body(self) -> Program:
        self._blanks()
        if self.peek(";"):
            self.pos += 1
        self._newlines_and_blanks()
        if self._at("{"):
            self.pos += 1
            body = self._body("}")
            self.pos += 1
            return body
        return self._do_group()

    def _for(self, line: int, *, asks: bool) -> Node:
        self._blanks()
        if self.peek("(("):
            close = self.matching_parens(self.pos + 2)
            pieces = self.text[self.pos + 2 : close].split(";") if close else []
            if close is None or len(pieces) != 3:
                raise self.fail("a bad for (( ; ; ))")
            words = [Word(self._sub_parts(piece), piece, line) for piece in pieces]
            self.pos = close + 2
            return CFor(words[0], words[1], words[2], self._loop_body(), line)
        name = self.word()
        if name is None:
            raise self.fail("a for without a name")
        self._newlines_and_blanks()
        if not self._at("in"):
            return For(name.source, None, self._loop_body(), line, asks)
        self.pos += 2
        words = []
        self._blanks()
        while (word := self.word()) is not None:
            words.append(word)
            self._blanks()
        return For(name.source, tuple(words), self._loop_body(), line, asks)

    def _case(self, line: int) -> Case:
        self._blanks()
        subject = self.word()
        if subject is None:
            raise self.fail("a case without a word")
        self._expect("in")
        items: list[tuple[tuple[Word, ...], Program, str]] = []
        while True:
            self._newlines_and_blanks()
            if self._at("esac"):
                self.pos += 4
                return Case(subject, tuple(items), line)
            if self.peek("("):
                self.pos += 1
            patterns = []
            while True:
                self._blanks()
                pattern = self.word(extglob=True)
                if pattern is None:
                    raise self.fail("a case pattern is missing")
                patterns.append(pattern)
                self._blanks()
                if not self.peek("|"):
                    break
                self.pos += 1
            self._expect(")")
            body = self._body(";;", ";&", "esac", may_be_empty=True)
            ender = next((mark for mark in (";;&", ";;", ";&") if self.peek(mark)), "")
            self.pos += len(ender)
            items.append((tuple(patterns), body, ender or ";;"))

    # -- simple commands ------------------------------------------------------------------------------------------

    def _simple(self, line: int) -> Simple:
        assigns: list[Assign] = []
        words: list[Word | Assign] = []
        redirects: list[Redirect] = []
        declares = False
        while True:
            self._blanks()
            if self._redirect(redirects):
                continue
            if not words or declares:
                assign = self._assignment()
                if assign:
                    if words:
                        words.append(assign)
                    else:
                        assigns.append(assign)
                    continue
            word = self.word()
            if word is None:
                break
            words.append(word)
            if len(words) > _MOST_WORDS:
                raise self.fail(f"a command of more than {_MOST_WORDS:,} words", line)
            declares = declares or (len(words) <= 2 and word.source in _DECLARE)
        if not (assigns or words or redirects):
            found = self.text[self.pos : self.pos + 2].strip()
            raise self.fail(f"syntax error near {found!r}" if found else "a command is missing")
        if self.peek("(") and words:
            raise self.fail("syntax error near '('")
        return Simple(tuple(assigns), tuple(words), tuple(redirects), line)

    def _redirect(self, redirects: list[Redirect]) -> bool:
        self._blanks()
        match = _REDIRECT.match(self.text, self.pos)
        if not match:
            return False
        line = self.line()
        self.pos = match.end()
        self._blanks()
        target = self.word()
        if target is None:
            raise self.fail("a redirection without a target")
        digits = match.group(1)
        if digits and digits.startswith("{"):
            raise InputError(
                f"a descriptor that bash chooses ({digits}) is not followed",
                where=f"{self.file}:{line}",
                hint="name one",
            )
        redirect = Redirect(int(digits) if digits and digits.isdigit() else None, match.group(2), target, line)
        if redirect.op in ("<<", "<<-"):
            self._heredocs.append((redirect, redirect.op == "<<-"))
        redirects.append(redirect)
        return True

    def _assignment(self) -> Assign | None:
        start, line = self.pos, self.line()
        match = _ASSIGN.match(self.text, start)
        if not match:
            return None
        index = None
        op = match.group(2)
        self.pos = match.end()
        if op == "[":
            self.pos -= 1
            try:
                index = self.subscript()
            except Exception:
                self.pos = start
                return None
            op = "+=" if self.peek("+=") else "=" if self.peek("=") else ""
            if not op:
                self.pos = start
                return None
            self.pos += len(op)
        array = self.peek("(") and index is None
        value: Word | ArrayLiteral = self._array() if array else self.word() or Word((), "", line)
        return Assign(match.group(1), index, op == "+=", value, line, self.text[start : self.pos])

    def _array(self) -> ArrayLiteral:
        line = self.line()
        self.pos += 1
        elements: list[tuple[str | None, bool, Word]] = []
        while True:
            self._newlines_and_blanks()
            if self.peek(")"):
                self.pos += 1
                return ArrayLiteral(tuple(elements))
            if self.pos >= self.end:
                raise self.fail("an array is not closed", line)
            key, append = None, False
            if self.peek("["):
                start = self.pos
                key = self.subscript()
                append = self.peek("+=")
                if self.peek("=") or append:
                    self.pos += 1 + append
                else:
                    key, self.pos = None, start
            word = self.word() or (Word((), "", self.line()) if key is not None else None)
            if word is None:
                raise self.fail(f"syntax error near {self.text[self.pos]!r} in an array")
            elements.append((key, append, word))
