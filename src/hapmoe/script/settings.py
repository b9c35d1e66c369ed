"""The flags that a planner reads, converted, with the place that each value came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hapmoe.errors import InputError
from hapmoe.script.argv import Occurrence
from hapmoe.script.flags import Flag
from hapmoe.script.values import Token

__all__ = ["Reading", "Setting", "settings_of"]

_Scalar = int | float | str | bool


@dataclass(frozen=True, slots=True)
class Setting:
    """One flag's value: the last occurrence's."""

    value: tuple[_Scalar, ...]
    """Words of the flag, converted; (True,) and (False,) for switches."""
    name: str
    where: str


def settings_of(occurrences: Iterable[Occurrence]) -> dict[str, Setting]:
    """By Megatron's attribute name. Raises InputError for a value that is missing, unknown or of a wrong kind."""
    last: dict[str, Occurrence] = {}
    for occurrence in occurrences:
        if occurrence.flag:
            last[occurrence.flag.key] = occurrence
    return {key: _convert(occurrence) for key, occurrence in last.items()}


def _convert(occurrence: Occurrence) -> Setting:
    flag, name, where = occurrence.flag, occurrence.name, occurrence.line
    assert flag is not None
    if flag.kind in ("set", "unset"):
        told = [(value.text or "").lower() for value in occurrence.values]
        return Setting(((flag.kind == "set") != ("false" in told),), name, where)
    if not occurrence.values and flag.arity != "*":
        raise InputError(f"{name} has no value", where=where)
    return Setting(tuple(_word(flag, name, value, where) for value in occurrence.values), name, where)


def _word(flag: Flag, name: str, token: Token, where: str) -> _Scalar:
    text = token.text
    if text is None:
        raise InputError(
            f"the value of {name} is not known before the run ({token.why or token.source})",
            where=where,
            hint="give the variables it needs with --env NAME=VALUE, or write the number",
        )
    try:
        if flag.kind == "int":
            return int(text)
        if flag.kind == "float":
            return float(text)
    except ValueError:
        kind = "a whole number" if flag.kind == "int" else "a number"
        raise InputError(f"{name}: {text!r} is not {kind}", where=where) from None
    if flag.choices and text not in flag.choices:
        raise InputError(f"{name}: {text!r} is not one of {', '.join(flag.choices)}", where=where)
    return text


@dataclass
class Reading:
    """One pass over the settings: every look-up leaves behind where the value came from."""

    settings: Mapping[str, Setting]
    where: str = ""
    """The launch, for what is missing from it."""
    origin: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def _first(self, key: str, into: str, default: str) -> _Scalar | None:
        setting = self.settings.get(key)
        if into and setting:
            self.origin[into] = setting.where or setting.name
        elif into:  # a field that several flags feed keeps what the first of them left
            self.origin.setdefault(into, default)
        return setting.value[0] if setting and setting.value else None

    def given(self, key: str) -> bool:
        return key in self.settings

    def place(self, key: str) -> str:
        """``--flag (train.sh:12)`` of a setting that is given."""
        setting = self.settings[key]
        return f"{setting.name} ({setting.where})" if setting.where else setting.name

    def integer(self, key: str, into: str = "", default: str = "default") -> int | None:
        value = self._first(key, into, default)
        return None if value is None else int(value)

    def integer_or(self, key: str, fallback: int, into: str = "", default: str = "default") -> int:
        value = self.integer(key, into, default)
        return fallback if value is None else value

    def number(self, key: str, into: str = "") -> float | None:
        value = self._first(key, into, "default")
        return None if value is None else float(value)

    def word(self, key: str, into: str = "") -> str | None:
        value = self._first(key, into, "default")
        return None if value is None else str(value)

    def words(self, key: str) -> tuple[str, ...]:
        setting = self.settings.get(key)
        return tuple(str(value) for value in setting.value) if setting else ()

    def integers(self, key: str) -> tuple[int, ...]:
        setting = self.settings.get(key)
        return tuple(int(value) for value in setting.value) if setting else ()

    def switch(self, key: str, into: str = "", *, default: bool = False) -> bool:
        value = self._first(key, into, "default")
        return default if value is None else bool(value)
