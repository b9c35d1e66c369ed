"""The answer, as data: the plan, what it is estimated to do, and how it was found.

``plan.json`` is these types written down; unknown keys are refused, missing ones have defaults so
that a plan can be written by hand.
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = [
    "Estimate",
    "MemoryBytes",
    "Plan",
    "Recompute",
    "SearchReport",
    "SearchResult",
    "Stage",
    "StageEstimate",
    "Violation",
]


class Recompute(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a stage computes again in its backward pass, in Megatron's terms."""

    granularity: Literal["none", "selective", "full"] = "none"
    modules: tuple[str, ...] = ()
    """Selective: core_attn, moe_act, layernorm, mla_up_proj, mlp, moe, shared_experts."""
    method: Literal["block", "uniform"] | None = None
    num_layers: int = 0
    """block: the first n layers of each virtual stage; uniform: units of n layers."""


class Stage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Consecutive ranks of one pool that hold one pipeline stage.

    Dense mesh ``tp * cp * dp`` and expert mesh ``etp * ep * edp`` are two factorings of the same
    ``num_devices`` ranks (Megatron's parallel folding).
    """

    pool: str
    num_layers: int
    """Decoder layers in all virtual stages together."""
    device: str = ""
    nodes: tuple[int, ...] = ()
    """Node numbers within the pool."""
    first_rank: int = 0
    num_devices: int = 0
    """0: tp * cp * dp."""
    micro_batch_size: int = 0
    """0: the plan's."""
    first_layer: int = 0
    virtual_layers: tuple[tuple[int, int], ...] = ()
    """[first layer, count] per virtual stage."""
    mtp_layers: int = 0
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    recompute: Recompute = Recompute()

    @property
    def edp(self) -> int:
        """Replicas of the expert weights: tp*cp*dp / (etp*ep)."""
        return self.tp * self.cp * self.dp // (self.etp * self.ep)


class MemoryBytes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Peak bytes of the fullest rank of a stage, by what holds them."""

    weights: float = 0
    grads: float = 0
    optimizer: float = 0
    activations: float = 0
    workspace: float = 0

    @property
    def total(self) -> float:
        return self.weights + self.grads + self.optimizer + self.activations + self.workspace


class StageEstimate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stage: ``forward_s`` and ``backward_s`` are one microbatch through all its virtual stages,
    with recomputation and exposed communication inside the stage, without pipeline sends."""

    forward_s: float
    backward_s: float
    exposed_comm_s: float
    """Part of forward_s + backward_s during which the devices only communicate."""
    memory_bytes: float
    memory_limit_bytes: float
    memory: MemoryBytes
    send_s: float = 0.0
    """One activation to the next stage."""
    grad_sync_s: float = 0.0
    """Gradient reduction that sticks out behind the backward pass."""
    optimizer_s: float = 0.0
    recompute_s: float = 0.0
    busy_s: float = 0.0
    """Time in a step that the stage computes or communicates inside itself."""
    breakdown: dict[str, float] = {}
    """Seconds of one microbatch by operation, forward and backward together."""
    bound_by: str = ""
    """compute, memory bandwidth, communication … : what most of the stage's time is bound by."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One step of a plan. Written by ``cost.evaluate`` and by nothing else."""

    step_s: float
    tokens_per_s: float
    tflop_per_s_per_device: float
    """Model FLOPs as Megatron counts them, per device used."""
    mfu: float
    """Model FLOPs over the dense peak of the devices used."""
    bubble_fraction: float
    """Share of device time in which a stage waits for another."""
    lower_bound_s: float = 0.0
    """The search's proven bound for the whole space; 0: no search was made."""
    ideal_s: float = 0.0
    """The step with nothing exposed and perfect balance on all devices of the cluster."""
    hardware_tflop_per_s_per_device: float = 0.0
    """With recomputation."""
    exposed_comm_fraction: float = 0.0
    optimizer_s: float = 0.0
    source_share: dict[str, float] = {}
    """measured, interpolated, extrapolated, roofline, assumed: shares of the predicted time."""
    stages: tuple[StageEstimate, ...] = ()
    fits: bool = True
    """Every stage within its memory limit."""
    price_per_hour: float = 0.0
    """Of the devices used, in the cluster file's currency; 0: some pool used has no price."""
    power_w: float = 0.0
    """Of the devices used, as the catalogue or the cluster file rates them; 0: some has none."""
    price_per_million_tokens: float = 0.0
    joule_per_token: float = 0.0
    """At those prices and powers all the time, idle or not."""
    assumptions: tuple[str, ...] = ()


class SearchReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the plan was found."""

    status: Literal["optimal", "feasible", "infeasible"]
    gap: float = 0.0
    """(step - lower bound) / step at the end of the search."""
    wall_s: float = 0.0
    considered: int = 0
    """Grid points of the search space that passed the rules."""
    pruned: dict[str, int] = {}
    """How many fell to which rule or bound."""
    reasons: tuple[str, ...] = ()
    """Infeasible: the nearest misses."""
    objective: str = "step"
    """What was minimized: step, cost or energy of a token; ``gap`` is of that."""
    believed_step_s: float = 0.0
    """What the planner itself expected of its plan; 0: the same as the estimate."""


class Compared(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another way to run the same job, searched in the same run and scored by the same oracle."""

    name: str
    step_s: float | None
    """None: ``note`` says why."""
    note: str = ""


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=False):
    """A complete parallel configuration; ``stages`` in pipeline and rank order."""

    stages: tuple[Stage, ...]
    micro_batch_size: int
    schema: int = 1
    planner: str = "hand"
    backend: str = "megatron"
    num_microbatches: int = 0
    """0: global_batch_size / (micro_batch_size * dp)."""
    global_batch_size: int = 0
    """0: the job's."""
    vpp: int = 1
    launchable: bool = True
    launch_reason: str | None = None
    alternatives: tuple[Plan, ...] = ()
    pareto: tuple[Plan, ...] = ()
    """Slower plans that take fewer devices, or less memory at the fullest one (asked for)."""
    estimate: Estimate | None = None
    search: SearchReport | None = None
    comparisons: tuple[Compared, ...] = ()
    inputs: dict[str, str] = {}
    notes: tuple[str, ...] = ()

    @property
    def pp(self) -> int:
        return len(self.stages)

    @property
    def num_devices(self) -> int:
        return sum(stage.num_devices for stage in self.stages)


class Violation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One broken rule: what, where it is enforced, what would mend it."""

    rule: str
    message: str
    source: str
    """File and line of the Megatron code, or the paper's equation."""
    stage: int | None = None
    hint: str = ""


class SearchResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a planner returns. ``plan`` and ``estimate`` are None when nothing fits."""

    status: Literal["optimal", "feasible", "infeasible"]
    plan: Plan | None
    estimate: Estimate | None
    ranked: tuple[tuple[Plan, Estimate], ...] = ()
    """Best first, ``plan`` included."""
    pareto: tuple[tuple[Plan, Estimate], ...] = ()
    """Slower ones with fewer devices or less memory, where asked for."""
    gap: float = 0.0
    report: SearchReport | None = None
