"""Launch scripts and argument vectors: what a training is, read without executing anything."""

from __future__ import annotations

from .read import read_command, read_script
from .values import Invocation, Token

__all__ = ["Invocation", "Token", "read_command", "read_script"]
