"""What is copied to machines that do not have hapmoe: the probe, and what times collectives alone."""

from __future__ import annotations

from importlib.resources import files as package_files

__all__ = ["alone_files", "probe_files"]

NAME = "hapmoe_probe"
"""The probe's package where it is carried: hapmoe itself may be installed there in another version."""
ALONE = "hapmoe_alone"
_ALONE = ("acts.py", "carried.py", "groups.py", "machine.py", "spread.py")


def probe_files() -> dict[str, str]:
    """Relative path -> text; the folder that they are put in goes in front of PYTHONPATH."""
    found = {}
    for entry in package_files("hapmoe.probe").iterdir():
        if entry.name == "sitecustomize.py":
            found[entry.name] = entry.read_text(encoding="utf-8")
        elif entry.name.endswith(".py"):
            found[f"{NAME}/{entry.name}"] = entry.read_text(encoding="utf-8")
    return dict(sorted(found.items()))


def alone_files() -> dict[str, str]:
    """The same of ``hapmoe_alone.carried`` and what it imports, under a name of their own."""
    found = {f"{ALONE}/__init__.py": ""}
    sources = [package_files("hapmoe.alone") / name for name in _ALONE] + [package_files("hapmoe") / "errors.py"]
    for entry in sources:
        text = entry.read_text(encoding="utf-8")
        for package in ("hapmoe.alone", "hapmoe"):
            text = text.replace(f"from {package}.", f"from {ALONE}.")
        found[f"{ALONE}/{entry.name}"] = text
    return found
