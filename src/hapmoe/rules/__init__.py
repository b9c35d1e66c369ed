"""Is a plan legal? Every rule that the runtimes enforce, with the line that enforces it.

``check`` is the only verdict: the search prunes with the same rules, and the launchers refuse by
them. Paths in sources: ``A`` megatron/training/arguments.py, ``TC``
megatron/core/transformer/transformer_config.py, ``MPC`` megatron/core/model_parallel_config.py,
``PS`` megatron/core/parallel_state.py, ``NM`` megatron/core/num_microbatches_calculator.py, ``PL``
megatron/core/transformer/pipeline_parallel_layer_layout.py, ``SCH``
megatron/core/pipeline_parallel/schedules.py, ``TD`` megatron/core/transformer/moe/token_dispatcher.py;
lines are those of Megatron-LM d98e8a64 (2026-08-22).
"""

from __future__ import annotations

from hapmoe.backends import capabilities
from hapmoe.cluster import Cluster
from hapmoe.job import JobSpec
from hapmoe.plan import Plan, Violation
from hapmoe.resolve import resolve
from hapmoe.rules import batch, flags, flagscale, galvatron, hetero, layers, mesh, placement, recompute
from hapmoe.rules.base import Context, Rule

__all__ = ["FORM", "RULES", "Rule", "check"]

FORM: tuple[Rule, ...] = mesh.FORM
"""Rules without which the others cannot be asked: positive degrees, known pools."""

RULES: tuple[Rule, ...] = (
    *mesh.RULES,
    *layers.RULES,
    *batch.RULES,
    *recompute.RULES,
    *placement.RULES,
    *flags.RULES,
    *flagscale.RULES,
    *galvatron.RULES,
    *hetero.RULES,
)


def check(job: JobSpec, cluster: Cluster, plan: Plan) -> tuple[Violation, ...]:
    """Every broken rule of ``plan`` (``()``: legal), judged for the back end that it names.

    Gaps of a hand-written plan are filled first (``resolve``). Raises InputError only for a back
    end that does not exist.

    Source: constraints of Megatron-LM d98e8a64; each violation carries its own line.
    """
    context = Context(job, cluster, resolve(job, cluster, plan), capabilities(plan.backend))
    return _apply(FORM, context) or _apply(RULES, context)


def _apply(rules: tuple[Rule, ...], context: Context) -> tuple[Violation, ...]:
    return tuple(
        Violation(rule=rule.name, message=broken.message, source=rule.source, stage=broken.stage, hint=broken.hint)
        for rule in rules
        for broken in rule.check(context)
    )
