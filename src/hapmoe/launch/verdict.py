"""May a plan be started? The back end's word and the rules', in one line."""

from __future__ import annotations

from hapmoe import backends
from hapmoe.cluster import Cluster
from hapmoe.job import JobSpec
from hapmoe.plan import Plan
from hapmoe.rules import check

__all__ = ["runnable_by", "verdict"]


def verdict(job: JobSpec, cluster: Cluster, plan: Plan) -> tuple[bool, str]:
    """(launchable, reason why not). A plan that breaks a rule is never started: the runtime would
    stop, or train something else in silence."""
    if not backends.capabilities(plan.backend).module:
        reasons = [f"{name}: {reason}" for name, reason in runnable_by(job, cluster, plan).items()]
        return False, f"back end {plan.backend!r} only evaluates plans; " + "; ".join(reasons)
    if broken := check(job, cluster, plan):
        where = f"stage {broken[0].stage}: " if broken[0].stage is not None else ""
        return False, f"rule {broken[0].rule}: {where}{broken[0].message}"
    possible, reason = backends.load(plan.backend).launchable(job, cluster, plan)
    return bool(possible), str(reason)


def runnable_by(job: JobSpec, cluster: Cluster, plan: Plan) -> dict[str, str]:
    """Per real back end: why it does not start this plan; empty: it does."""
    import msgspec

    found = {}
    for name, capability in backends.BACKENDS.items():
        if capability.module:
            possible, reason = verdict(job, cluster, msgspec.structs.replace(plan, backend=name))
            found[name] = "" if possible else reason
    return found
