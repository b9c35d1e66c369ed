"""What a job can be read from: a launch script, a command, or a file that holds a training's configuration.

Every kind ends in the same :class:`Invocation`, the argument vector that Megatron-LM's training program would get;
what the arguments mean is then read in one place (:mod:`hapmoe.script.megatron_args`).
"""

from __future__ import annotations

from .choose import read_input

__all__ = ["read_input"]
