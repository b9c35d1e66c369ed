"""plan.json: plans in and out of text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from hapmoe.errors import InputError
from hapmoe.fields import closest
from hapmoe.plan import Compared, Estimate, MemoryBytes, Plan, Recompute, SearchReport, Stage, StageEstimate

__all__ = ["dump_plan", "load_plan"]

SCHEMA = 1
_KINDS = (Plan, Stage, Recompute, Estimate, StageEstimate, MemoryBytes, SearchReport, Compared)


def load_plan(source: str | os.PathLike[str] | Mapping[str, Any]) -> Plan:
    """A plan from plan.json, a path to one, or a dict of the same shape (also a hand-written one).

    What is missing has the defaults of ``plan.Plan`` and ``plan.Stage``. InputError names the field
    that is unknown or of the wrong type, or what is wrong with the file.
    """
    where = "plan"
    try:
        if isinstance(source, Mapping):
            plan = msgspec.convert(dict(source), Plan)
        else:
            where = os.fspath(source)
            plan = msgspec.json.decode(Path(source).read_bytes(), type=Plan)
    except OSError as error:
        raise InputError(error.strerror or str(error), where=where) from None
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at ")
        unknown = text.partition("unknown field `")[2].rstrip("`")
        known = [name for kind in _KINDS for name in kind.__struct_fields__]
        hint = closest(unknown, known) if unknown else ""
        raise InputError(text, where=f"{where}: {path.strip('`$.') or 'top'}", hint=hint) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"not JSON: {error}", where=where) from None
    if plan.schema != SCHEMA:
        raise InputError(f"schema {plan.schema}, this version reads {SCHEMA}", where=f"{where}: schema")
    return plan


def dump_plan(plan: Plan) -> str:
    """plan.json, indented, with a newline at the end."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=1).decode() + "\n"
