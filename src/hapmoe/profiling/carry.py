"""The probe as files: what is copied to machines that do not have hapmoe."""

from __future__ import annotations

from importlib.resources import files as package_files

__all__ = ["probe_files"]

NAME = "hapmoe_probe"
"""The probe's package where it is carried: hapmoe itself may be installed there in another version."""


def probe_files() -> dict[str, str]:
    """Relative path -> text; the folder that they are put in goes in front of PYTHONPATH."""
    found = {}
    for entry in package_files("hapmoe.probe").iterdir():
        if entry.name == "sitecustomize.py":
            found[entry.name] = entry.read_text(encoding="utf-8")
        elif entry.name.endswith(".py"):
            found[f"{NAME}/{entry.name}"] = entry.read_text(encoding="utf-8")
    return dict(sorted(found.items()))
