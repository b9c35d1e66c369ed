"""Loaded by Python at its start where this folder is on PYTHONPATH; does nothing unless the environment asks for it.

A sitecustomize that this one stands in front of runs as it would have.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys


def chain() -> None:
    """Run the next sitecustomize on the path."""
    here = os.path.dirname(os.path.abspath(__file__))
    rest = [folder for folder in sys.path if os.path.abspath(folder or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("HAPMOE_PROBE"):
    importlib.import_module("hapmoe_probe.install").install()
chain()
