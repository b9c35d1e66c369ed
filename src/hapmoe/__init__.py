"""HAPMoE: plans Mixture-of-Experts training on mixed accelerators.

    import hapmoe
    job = hapmoe.extract("train.sh")
    cluster = hapmoe.load_cluster("cluster.yaml")
    result = hapmoe.plan(job, cluster)
    print(result.status, result.estimate.step_s)

Names are loaded when first used, so importing the package costs nothing.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hapmoe.api import check, evaluate, extract, load_cluster, load_plan, plan, timeline
    from hapmoe.errors import HapmoeError

__all__ = ["HapmoeError", "check", "evaluate", "extract", "load_cluster", "load_plan", "plan", "timeline"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hapmoe' has no attribute {name!r}")
    module = "hapmoe.errors" if name == "HapmoeError" else "hapmoe.api"
    return getattr(importlib.import_module(module), name)


class _Package(ModuleType):
    """``hapmoe.plan`` and ``hapmoe.extract`` are the functions, whatever was imported before: Python
    would put the modules of these names there as soon as anything loads them."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
