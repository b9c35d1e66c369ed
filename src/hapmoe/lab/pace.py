"""How fast this processor is just now, so that CPU times of different minutes can be compared.

A core that shares its caches and its clock with other work takes up to a third more CPU time for the same
training step. A fixed piece of work between the steps sees the same: what is compared is the ratio.
"""

from __future__ import annotations

import os
import time
from typing import Any

__all__ = ["Pace", "asked"]

_ROWS, _WIDTH, _INNER, _TIMES = 128, 256, 512, 4
"""Matrices as small as the lab's layers have, so that calls weigh as much in it as they do there."""


def asked() -> bool:
    """``HAPMOE_LAB_PACE=1``: the training program tells its pace with every iteration."""
    return os.environ.get("HAPMOE_LAB_PACE") == "1"


class Pace:
    """The same small passes every time: about 10 ms."""

    def __init__(self) -> None:
        import torch

        generator = torch.Generator().manual_seed(1)
        self._torch: Any = torch
        self._input = torch.randn(_ROWS, _WIDTH, generator=generator)
        self._weights = [
            (torch.randn(rows, columns, generator=generator) * rows**-0.5).requires_grad_()
            for rows, columns in ((_WIDTH, _INNER), (_INNER, _WIDTH))
        ]

    def __call__(self) -> float:
        """CPU seconds that it took."""
        functional, (up, down) = self._torch.nn.functional, self._weights
        begin = time.process_time()
        for _ in range(_TIMES):
            hidden = functional.silu(functional.layer_norm(self._input, (_WIDTH,)) @ up)
            self._torch.autograd.grad((hidden @ down).softmax(dim=-1).square().sum(), self._weights)
        return time.process_time() - begin
