"""What each runtime can express, as data; the modules that emit for it are loaded when asked for.

``rules`` and the search read ``Capabilities``; only ``launch`` loads a back end's module.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

from hapmoe.errors import InputError, Unsupported

__all__ = ["BACKENDS", "Capabilities", "capabilities", "load", "version_tuple"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a plan may ask of one runtime."""

    name: str
    module: str = ""
    """Python module with ``program``, ``stage_arguments`` and ``launchable``; empty: plans are evaluated only."""
    per_stage_degrees: bool = False
    """tp, cp, ep, etp, dp, micro-batch size and device count may differ between stages."""
    uneven_layers: bool = False
    vpp: bool = False
    cp: bool = False
    per_stage_recompute: bool = False
    mixed_vendor_transports: frozenset[str] = frozenset()
    """Transports over which stages of different vendors can be joined; empty: one vendor only."""
    recompute_modules: dict[str, str]
    """Module of selective recomputation: first version that knows it."""
    min_version: str
    """Oldest Megatron-Core that the emitted flags were checked against."""
    layout_version: str
    """First version with a free layer layout; older ones split evenly."""
    before_version: str = ""
    """First version that no longer does what the flags say; empty: none known."""
    envelope: bool = False
    """Shapes outside FlagScale's safe envelope are refused."""
    equal_stages: bool = False
    """Every stage holds equally many devices."""
    own_target: str = ""
    """The only target that writes for it; empty: every launcher starts it."""
    runtime: bool = False
    """``hapmoe.runtime`` joins stages that differ in degrees or in collective library."""
    note: str = ""
    """What somebody who chooses this back end must know."""

    def modules(self, version: str | None) -> tuple[str, ...]:
        """Modules of selective recomputation that ``version`` (None: the newest) knows."""
        known = self.recompute_modules
        return tuple(
            name for name, since in known.items() if version is None or version_tuple(version) >= version_tuple(since)
        )

    def uneven(self, version: str | None) -> bool:
        """May stages hold unequal numbers of layers in ``version`` (None: the newest)?"""
        return self.uneven_layers and (version is None or version_tuple(version) >= version_tuple(self.layout_version))


_MODULES = {
    # Megatron-LM, argument "--recompute-modules" by release branch (core_r0.12 ... main).
    "core_attn": "0.12.0",
    "moe_act": "0.12.0",
    "layernorm": "0.12.0",
    "mla_up_proj": "0.12.0",
    "mlp": "0.12.0",
    "moe": "0.12.0",
    "shared_experts": "0.14.0",
}

BACKENDS: dict[str, Capabilities] = {
    "megatron": Capabilities(
        name="megatron",
        module="hapmoe.backends.megatron",
        uneven_layers=True,
        vpp=True,
        cp=True,
        per_stage_recompute=True,
        recompute_modules=_MODULES,
        min_version="0.12.0",
        layout_version="0.13.0",
    ),
    "megatron-hetero": Capabilities(
        name="megatron-hetero",
        module="hapmoe.backends.megatron_hetero",
        per_stage_degrees=True,
        uneven_layers=True,
        vpp=True,
        cp=True,
        per_stage_recompute=True,
        mixed_vendor_transports=frozenset({"flagcx", "gloo"}),
        recompute_modules=_MODULES,
        min_version="0.12.0",
        layout_version="0.13.0",
        runtime=True,
        note="Megatron-LM upstream with hapmoe.runtime: EXPERIMENTAL, verified on CPU, never on GPUs or across vendors",
    ),
    "flagscale": Capabilities(
        name="flagscale",
        module="hapmoe.backends.flagscale",
        per_stage_degrees=True,
        uneven_layers=True,
        per_stage_recompute=True,
        mixed_vendor_transports=frozenset({"flagcx", "gloo"}),
        recompute_modules=_MODULES,
        min_version="0.12.0",
        layout_version="0.12.0",
        before_version="0.16.0",
        envelope=True,
        note="FlagScale v0.9.0, or Megatron-LM-FL v0.1.0+megatron0.15.0rc7 with its FlagScale; no other version",
    ),
    "flagscale-patched": Capabilities(
        name="flagscale-patched",
        module="hapmoe.backends.flagscale",
        per_stage_degrees=True,
        uneven_layers=True,
        per_stage_recompute=True,
        mixed_vendor_transports=frozenset({"flagcx", "gloo"}),
        recompute_modules=_MODULES,
        min_version="0.12.0",
        layout_version="0.12.0",
        before_version="0.16.0",
        note="FlagScale v0.9.0 with flagscale/hapmoe-hetero.patch, which you apply yourself and read before",
    ),
    "galvatron": Capabilities(
        name="galvatron",
        module="hapmoe.backends.galvatron",
        per_stage_degrees=True,
        uneven_layers=True,
        cp=True,
        per_stage_recompute=True,
        recompute_modules={},  # whole layers only
        min_version="0.0.0",  # not Megatron-Core
        layout_version="0.0.0",
        equal_stages=True,
        own_target="galvatron",
        note="Hetu-Galvatron cea12ff (2026-06-16), with a model configuration of its own; only its strategy file is "
        "written (--target galvatron)",
    ),
    "any": Capabilities(
        name="any",
        per_stage_degrees=True,
        uneven_layers=True,
        vpp=True,
        cp=True,
        per_stage_recompute=True,
        mixed_vendor_transports=frozenset({"nccl", "rccl", "hccl", "flagcx", "gloo"}),
        recompute_modules=_MODULES,
        min_version="0.12.0",
        layout_version="0.13.0",
    ),
}
"""By the name that ``--backend`` takes. ``any`` is the union of capabilities: plans under it may
have no runtime that launches them."""


def capabilities(name: str) -> Capabilities:
    """What the back end called ``name`` can express; InputError if there is none."""
    try:
        return BACKENDS[name]
    except KeyError:
        raise InputError(f"no back end {name!r}", where="backend", hint=f"one of {', '.join(BACKENDS)}") from None


def load(name: str) -> ModuleType:
    """The module that emits for ``name``; Unsupported where plans can only be evaluated."""
    module = capabilities(name).module
    if not module:
        raise Unsupported(f"back end {name!r} only evaluates plans: nothing can be launched with it")
    return importlib.import_module(module)


def version_tuple(text: str) -> tuple[int, ...]:
    """Leading numbers of a version, for comparison; development suffixes are ignored.

    >>> version_tuple("0.16.1") < version_tuple("0.20.0.dev1")
    True
    """
    numbers = []
    for part in text.removeprefix("core_").removeprefix("v").removeprefix("r").split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers + [0] * (3 - len(numbers)))
