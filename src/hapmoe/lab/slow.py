"""A slower device, imitated.

``HAPMOE_LAB_SLOW=3`` keeps the processor busy after each forward and backward pass until three times its
CPU time is used up. No rights, quotas or other processes are needed, and CPU clocks see it.
``HAPMOE_LAB_CGROUP=FILE`` (a control group's ``cgroup.procs``) gives the training, but not its start, the quota of
a group that somebody with the rights has made. Only wall time sees it.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["factor", "join_group", "slowed"]


def factor() -> float:
    """How many times slower this process shall be."""
    return float(os.environ.get("HAPMOE_LAB_SLOW", "1"))


def join_group() -> None:
    """Put this process, with all its threads, into the control group that the environment names."""
    if group := os.environ.get("HAPMOE_LAB_CGROUP"):
        Path(group).write_text(str(os.getpid()))


def slowed(act: Callable[..., Any]) -> Callable[..., Any]:
    """``act``, slower by ``factor``."""
    times = factor()
    if times <= 1.0:
        return act

    @functools.wraps(act)
    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.process_time()
        result = act(*args, **kwargs)
        until = begin + times * (time.process_time() - begin)
        while time.process_time() < until:
            pass
        return result

    return call
