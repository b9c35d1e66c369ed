"""``hapmoe check``: is this plan for this job on this cluster legal, runnable and up to date? One page, no device.

Looking at the machines is the business of the launch folder (``check_hosts.py``, ``check_ranks.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from hapmoe import backends
from hapmoe.backends.meshes import meshes
from hapmoe.cluster import Cluster
from hapmoe.job import JobSpec
from hapmoe.launch.verdict import runnable_by, verdict
from hapmoe.plan import Plan, Violation
from hapmoe.resolve import resolve
from hapmoe.rules import FORM, RULES, check

__all__ = ["Checked", "check_plan", "render_check"]

CHECKED = "Megatron-LM d98e8a64 (0.20.0 dev); emitted flags: release branches core_r0.12.0 to core_r0.19.0 and main"
"""What the rules and the emitted flags were read from."""


@dataclass(frozen=True, slots=True)
class Checked:
    """Everything that can be said of a plan without a machine."""

    plan: Plan
    violations: tuple[Violation, ...]
    launchable: bool
    reason: str
    others: dict[str, str]
    """Per other back end: why it does not start the plan; empty: it does."""
    stale: tuple[str, ...]
    """Inputs that have changed since the plan was made."""

    @property
    def good(self) -> bool:
        return self.launchable and not self.violations

    def document(self) -> dict[str, object]:
        """The same for ``--json``: every rule with its source and verdict."""
        broken = {violation.rule for violation in self.violations}
        rules = [
            {"rule": rule.name, "holds": rule.name not in broken, "why": rule.why, "source": rule.source}
            for rule in (*FORM, *RULES)
        ]
        return {
            "legal": not self.violations,
            "launchable": self.launchable,
            "reason": self.reason,
            "checked_for": CHECKED,
            "stale_inputs": list(self.stale),
            "violations": [
                {
                    "rule": v.rule,
                    "stage": v.stage,
                    "message": v.message,
                    "source": v.source,
                    "hint": v.hint,
                }
                for v in self.violations
            ],
            "other_backends": self.others,
            "rules": rules,
        }


def check_plan(job: JobSpec, cluster: Cluster, plan: Plan) -> Checked:
    """All rules, the back end's word, and whether job and cluster are those of the plan."""
    violations = check(job, cluster, plan)
    possible, reason = (False, "") if violations else verdict(job, cluster, plan)
    others = {} if violations and not plan.stages else runnable_by(job, cluster, plan)
    others.pop(plan.backend, None)
    found = {"job": job.sha256, "cluster": cluster.sha256}
    stale = tuple(
        name for name, digest in found.items() if plan.inputs.get(f"{name}_sha256", digest) not in ("", digest)
    )
    return Checked(resolve(job, cluster, plan), violations, possible, reason, others, stale)


def render_check(checked: Checked, job: JobSpec, cluster: Cluster) -> str:
    """The page."""
    plan = checked.plan
    lines = []
    if checked.good:
        lines.append(f"Legal and launchable by {plan.backend}.")
    elif checked.violations:
        count = len(checked.violations)
        lines.append(f"NOT LEGAL: {count} rule{'s' if count > 1 else ''} broken.")
    else:
        lines.append(f"NOT LAUNCHABLE: {checked.reason}")
    for violation in checked.violations:
        where = f" (stage {violation.stage})" if violation.stage is not None else ""
        lines.append(f"  {violation.rule}{where}: {violation.message}")
        if violation.hint:
            lines.append(f"      {violation.hint}")
        lines.append(f"      source: {violation.source}")
    for name in checked.stale:
        lines.append(f"  The {name} is not the one that the plan was made for: its estimate is of another {name}.")
    lines += ["", *_stage_table(plan)]
    capability = backends.capabilities(plan.backend)
    if capability.module.endswith(".flagscale") and not checked.violations:
        inside = "inside the safe envelope" if capability.envelope else "with the patch"
        shown = ", ".join(
            f"{mesh.name(index)} {'x'.join(map(str, mesh.words))}"
            for index, mesh in enumerate(meshes(job, plan, patched=not capability.envelope))
        )
        lines += ["", f"Process meshes (tp x cp x ep x dp x pp), {inside}: {shown}"]
    if capability.note:
        lines += ["", f"Runs on {capability.note}."]
    can = [name for name, reason in checked.others.items() if not reason]
    if can and not checked.good:
        lines += ["", f"Runs as it stands with --backend {' or '.join(can)}."]
    broken = {violation.rule for violation in checked.violations}
    kept = dict.fromkeys(f"{rule.name} ({rule.source})" for rule in (*FORM, *RULES) if rule.name not in broken)
    version = job.training.megatron_version or "not given"
    lines += ["", f"Rules that hold ({len(kept)}), checked for {CHECKED}; the job's Megatron-Core: {version}."]
    lines += _wrap("; ".join(kept))
    return "\n".join(lines)


def _stage_table(plan: Plan) -> list[str]:
    lines = ["stage  ranks        nodes     pool          device              layers  tp cp ep etp dp  recompute"]
    for index, stage in enumerate(plan.stages):
        ranks = f"{stage.first_rank}-{stage.first_rank + stage.num_devices - 1}"
        nodes = _span(stage.nodes)
        degrees = f"{stage.tp:>2} {stage.cp:>2} {stage.ep:>2} {stage.etp:>3} {stage.dp:>2}"
        recompute = stage.recompute
        shown: str = recompute.granularity
        if shown == "full":
            shown = f"full, {recompute.method} {recompute.num_layers}"
        elif shown == "selective":
            shown = " ".join(recompute.modules) or "core_attn"
        lines.append(
            f"{index:>5}  {ranks:<11}  {nodes:<8}  {stage.pool:<12}  {stage.device:<18}  {stage.num_layers:>6}  "
            f"{degrees}  {shown}"
        )
    return lines


def _span(nodes: tuple[int, ...]) -> str:
    if not nodes:
        return "-"
    consecutive = nodes == tuple(range(nodes[0], nodes[-1] + 1))
    if len(nodes) == 1 or not consecutive:
        return ",".join(map(str, nodes))
    return f"{nodes[0]}-{nodes[-1]}"


def _wrap(text: str, width: int = 110) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
