"""Reading ``[[ ]]`` expressions."""

from __future__ import annotations

import re

from .parse_lines import Lines
from .syntax import Literal, Part, Test, Word

__all__ = ["Conditions"]

_UNARY = re.compile(r"-[a-zA-Z](?=[\s])")
_BINARY = re.compile(r"(==|=~|!=|=|<|>|-eq|-ne|-lt|-le|-gt|-ge|-nt|-ot|-ef)(?=[\s])|[<>]")


class Conditions(Lines):
    """Conditions of a script."""

    def _test_or(self) -> Test:
        left = self._test_and()
        self._newlines_and_blanks()
        while self.peek("||"):
            self.pos += 2
            left = Test("or", tests=(left, self._test_and()))
            self._newlines_and_blanks()
        return left

    def _test_and(self) -> Test:
        left = self._test_not()
        self._newlines_and_blanks()
        while self.peek("&&"):
            self.pos += 2
            left = Test("and", tests=(left, self._test_not()))
            self._newlines_and_blanks()
        return left

    def _test_not(self) -> Test:
        self._newlines_and_blanks()
        if self._at("!"):
            self.pos += 1
            return Test("not", tests=(self._test_not(),))
        if self.peek("("):
            self.pos += 1
            inner = self._test_or()
            self._expect(")")
            return inner
        unary = _UNARY.match(self.text, self.pos)
        if unary:
            start = self.pos
            self.pos = unary.end()
            self._blanks()
            if not self.peek("]]") and not _BINARY.match(self.text, self.pos):
                return Test(unary.group(), (self._test_word(),))
            self.pos = start
        left = self._test_word()
        self._newlines_and_blanks()
        binary = _BINARY.match(self.text, self.pos)
        if not binary:
            return Test("word", (left,))
        self.pos = binary.end()
        self._blanks()
        right = self._regex() if binary.group() == "=~" else self._test_word()
        return Test(binary.group(), (left, right))

    def _test_word(self) -> Word:
        word = self.word(extglob=True)
        if word is None:
            raise self.fail("a [[ ]] expression is not complete")
        return word

    def _regex(self) -> Word:
        """The word after ``=~``: parentheses, bars and angles are part of it, and blanks inside parentheses."""
        start, level = self.pos, 0
        word_parts: list[Part] = []
        while self.pos < self.end:
            char = self.text[self.pos]
            if char in "(|)<>;&" or (level and char in " \t"):
                if char == ")" and level == 0:
                    break
                level += (char == "(") - (char == ")")
                word_parts.append(Literal(char))
                self.pos += 1
                continue
            before = self.pos
            word_parts += self.parts_until(frozenset(" \t\n;&|<>()"))
            if self.pos == before:
                break
        return Word(tuple(word_parts), self.text[start : self.pos], self.line(start))
