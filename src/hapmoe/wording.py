"""Plans in words: the phrases that the terminal summary and the report share. Plain text only.

Names come from other people's scripts and files: ``clean`` takes control characters out of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from hapmoe.cluster import Cluster
from hapmoe.job import JobSpec
from hapmoe.plan import Estimate, Plan, Recompute, SearchReport, SearchResult, Stage
from hapmoe.resolve import resolve
from hapmoe.units import format_bytes, format_count, format_seconds

__all__ = [
    "DEGREES",
    "clean",
    "count_devices",
    "describe_certificate",
    "describe_difference",
    "describe_job",
    "describe_layers",
    "describe_misfits",
    "describe_nodes",
    "describe_objective",
    "describe_pools",
    "describe_ranks",
    "describe_recompute",
    "describe_slowdown",
    "describe_sources",
    "describe_speedup",
    "describe_workload",
    "format_percent",
    "format_ranges",
    "list_alternatives",
    "list_caveats",
    "list_virtual_layers",
]

DEGREES = ("tp", "cp", "ep", "etp", "dp")

_SOURCE_WORDS = {
    "measured": "measured",
    "interpolated": "interpolated between measurements",
    "extrapolated": "extrapolated beyond measurements",
    "roofline": "roofline",
    "assumed": "assumed",
}


def clean(text: str) -> str:
    """Text that cannot move a terminal's cursor: control and bidi characters become ``?``.

    >>> clean("a\\x1b[31mb")
    'a?[31mb'
    """
    return "".join(char if char.isprintable() else " " if char in "\n\t" else "?" for char in text)


def format_percent(fraction: float) -> str:
    """``31 %``, ``4.2 %``, ``0.3 %``: two digits are all that an estimate deserves.

    >>> format_percent(0.0421), format_percent(0.314), format_percent(0)
    ('4.2 %', '31 %', '0 %')
    """
    value = fraction * 100
    if value == 0:
        return "0 %"
    if 0 < value < 0.05:
        return "<0.1 %"
    return f"{value:.1f}".removesuffix(".0") + " %" if abs(value) < 9.95 else f"{value:.0f} %"


def format_ranges(numbers: Iterable[int]) -> str:
    """``0-3, 6, 8-9`` from a set of numbers.

    >>> format_ranges([3, 0, 1, 2, 6])
    '0-3, 6'
    """
    ordered = sorted(set(numbers))
    runs: list[str] = []
    for _, run in groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ", ".join(runs)


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def describe_workload(job: JobSpec) -> str:
    """``46.7 B parameters, 32 layers, 8 experts (top 2), sequences of 4,096 tokens, global batch 256, bf16``."""
    from hapmoe.counting import count_params

    model, training = job.model, job.training
    vocabulary = "" if model.vocab_size or model.padded_vocab_size else " (vocabulary not known)"
    parts = [f"{format_count(count_params(model))} parameters{vocabulary}", _count(model.num_layers, "layer")]
    if model.moe:
        parts.append(f"{_count(model.moe.num_experts, 'expert')} (top {model.moe.top_k})")
    parts.append(f"sequences of {training.seq_len:,} tokens")
    if training.global_batch_size:
        parts.append(f"global batch {training.global_batch_size:,}")
    parts.append(training.precision + (f" with fp8 ({training.fp8_recipe})" if training.fp8_recipe else ""))
    return ", ".join(parts)


def describe_job(job: JobSpec) -> str:
    """The job's name and its workload."""
    return f"{clean(job.name)}: {describe_workload(job)}"


def describe_pools(cluster: Cluster) -> str:
    """``2 x 8 h800-80g-sxm (h800) + 2 x 8 ascend-910b (ascend), 32 devices``."""
    pools = [
        f"{pool.nodes} x {pool.devices_per_node} {clean(pool.device.name)}"
        + (f" ({clean(pool.name)})" if pool.name != pool.device.name else "")
        for pool in cluster.pools
    ]
    return f"{' + '.join(pools)}, {_count(cluster.num_devices, 'device')}"


def list_virtual_layers(stage: Stage) -> tuple[tuple[int, int], ...]:
    """[first layer, count] per virtual stage, also where the plan leaves it out."""
    return stage.virtual_layers or ((stage.first_layer, stage.num_layers),)


def describe_layers(plan: Plan, index: int) -> str:
    """Layers of a stage, with E (embedding), MTP and H (head and loss): ``E 0-7 | 32-39``.

    Without vpp one range; with it one per virtual stage, in order.
    """
    stage = plan.stages[index]
    chunks = [
        f"{first}-{first + count - 1}" if count > 1 else str(first) if count else "none"
        for first, count in list_virtual_layers(stage)
    ]
    if index == 0:
        chunks[0] = f"E {chunks[0]}"
    if stage.mtp_layers:
        chunks[-1] += f" {stage.mtp_layers} MTP" if stage.mtp_layers > 1 else " MTP"
    if index == plan.pp - 1:
        chunks[-1] += " H"
    return " | ".join(chunks)


def describe_nodes(stage: Stage) -> str:
    """``node 0``, ``nodes 0-3`` or nothing where the plan does not say."""
    if not stage.nodes:
        return ""
    return f"node{'s' if len(stage.nodes) > 1 else ''} {format_ranges(stage.nodes)}"


def count_devices(stage: Stage) -> int:
    """Devices of a stage, also where a hand-written plan leaves the number out."""
    return stage.num_devices or stage.tp * stage.cp * stage.dp


def describe_ranks(stage: Stage) -> str:
    """``0-7``: the stage's global ranks."""
    return format_ranges(range(stage.first_rank, stage.first_rank + count_devices(stage)))


def describe_recompute(recompute: Recompute) -> str:
    """``none``, ``core_attn, mlp``, ``full: 3 layers``, ``full: units of 1``."""
    if recompute.granularity == "none":
        return "none"
    if recompute.granularity == "selective":
        return ", ".join(clean(module) for module in recompute.modules) or "core_attn"
    if recompute.method == "uniform":
        return f"full: units of {recompute.num_layers or 1}"
    return f"full: {_count(recompute.num_layers, 'layer')}" if recompute.num_layers else "full"


def describe_sources(share: Mapping[str, float]) -> str:
    """Where the predicted time comes from: ``97 % roofline, 3 % assumed: nothing here was measured yet``."""
    parts = sorted(((value, name) for name, value in share.items() if value > 0), reverse=True)
    if not parts:
        return ""
    sentence = ", ".join(f"{format_percent(value)} {_SOURCE_WORDS.get(name, clean(name))}" for value, name in parts)
    if share.get("measured", 0) + share.get("interpolated", 0) + share.get("extrapolated", 0) == 0:
        sentence += ": nothing was measured on these devices, absolute times are rough"
    return sentence


def describe_certificate(estimate: Estimate, search: SearchReport) -> str:
    """One sentence about how good the plan is proven to be."""
    took, after = (f" {word} {format_seconds(search.wall_s)}" if search.wall_s else "" for word in ("in", "after"))
    bound = f": no plan can be faster than {format_seconds(estimate.lower_bound_s)}" if estimate.lower_bound_s else ""
    if search.status == "optimal" and search.gap <= 1e-9:
        return f"optimal under the cost model, proven{took}"
    if search.status == "optimal":
        return f"within {format_percent(search.gap)} of the optimum, proven{took}{bound}"
    if search.gap <= 0:
        return f"best found{took}, without a proof"
    return f"best found when the search was stopped{after}; gap at most {format_percent(search.gap)}{bound}"


def describe_objective(estimate: Estimate, search: SearchReport) -> str:
    """What was minimized and how much of it a token takes; empty for the step."""
    if search.objective == "cost":
        per_hour = f"{estimate.price_per_hour:,.2f} an hour for the devices used"
        return f"Minimized: the price of a token; a million takes {estimate.price_per_million_tokens:.4g} ({per_hour})."
    if search.objective == "energy":
        power = f"{estimate.power_w / 1000:,.1f} kW of rated power"
        return f"Minimized: the energy of a token, {estimate.joule_per_token:.4g} J ({power} for the devices used)."
    return ""


def describe_speedup(ours_s: float, other_s: float) -> str:
    """``1.37 x faster``, ``as fast``, ``1.02 x slower``: this plan against another step time."""
    if ours_s <= 0 or other_s <= 0:
        return ""
    ratio = other_s / ours_s
    if abs(ratio - 1) < 0.0005:
        return "as fast"
    digits = 3 if abs(ratio - 1) < 0.01 else 2
    return f"{ratio:.{digits}f} x faster" if ratio > 1 else f"{1 / ratio:.{digits}f} x slower"


def describe_slowdown(best_s: float, other_s: float) -> str:
    """``+4.2 %``: how much longer another plan's step is."""
    if best_s <= 0:
        return ""
    change = other_s / best_s - 1
    if abs(change) < 5e-5:
        return "same"
    return ("+" if change > 0 else "-") + format_percent(abs(change))


def describe_misfits(plan: Plan, estimate: Estimate) -> tuple[str, ...]:
    """One line per stage that does not fit into its devices' memory."""
    lines = []
    for index, (stage, cost) in enumerate(zip(plan.stages, estimate.stages, strict=True)):
        if cost.memory_bytes > cost.memory_limit_bytes:
            over = cost.memory_bytes - cost.memory_limit_bytes
            parts = {name: getattr(cost.memory, name) for name in cost.memory.__struct_fields__}
            most = max(parts, key=lambda name: parts[name])
            lines.append(
                f"stage {index} ({clean(stage.pool)}) needs {format_bytes(cost.memory_bytes)} of "
                f"{format_bytes(cost.memory_limit_bytes)}: {format_bytes(over)} too much, most of it {most}"
            )
    return tuple(lines)


def _pool_order(plan: Plan) -> list[str]:
    return [pool for pool, _ in groupby(stage.pool for stage in plan.stages)]


def _join(values: Sequence[object]) -> str:
    return "/".join(str(value) for value in values)


def _names(names: Iterable[str]) -> str:
    return ", ".join(clean(name) for name in names)


def _degree_changes(best: Plan, other: Plan) -> list[str]:
    """``ep 4 instead of 8`` (every pool the same) or ``tp 2 instead of 4 on h800``."""

    def degrees(plan: Plan, pool: str, axis: str) -> list[int]:
        return sorted({getattr(stage, axis) for stage in plan.stages if stage.pool == pool})

    common = [pool for pool in dict.fromkeys(s.pool for s in best.stages) if any(s.pool == pool for s in other.stages)]
    changes = []
    for axis in DEGREES:
        pairs = {pool: (degrees(other, pool, axis), degrees(best, pool, axis)) for pool in common}
        changed = {pool: pair for pool, pair in pairs.items() if pair[0] != pair[1]}
        if changed and len({str(pair) for pair in changed.values()}) == 1 and len(changed) == len(common):
            new, old = next(iter(changed.values()))
            changes.append(f"{axis} {_join(new)} instead of {_join(old)}")
        else:
            changes += [
                f"{axis} {_join(new)} instead of {_join(old)} on {clean(pool)}" for pool, (new, old) in changed.items()
            ]
    return changes


def _layer_changes(best: Plan, other: Plan) -> list[str]:
    ours = [stage.num_layers for stage in best.stages]
    theirs = [stage.num_layers for stage in other.stages]
    if ours == theirs:
        return []
    if len(ours) <= 8:
        return [f"layers {_join(theirs)} instead of {_join(ours)}"]
    changed = [index for index, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
    return [f"another layer split in {_count(len(changed), 'stage')}"]


def _recompute_changes(best: Plan, other: Plan) -> list[str]:
    """One phrase per new setting, with the settings that it replaces and where."""
    changed: dict[str, list[int]] = {}
    for index, (a, b) in enumerate(zip(best.stages, other.stages, strict=True)):
        if a.recompute != b.recompute:
            changed.setdefault(describe_recompute(b.recompute), []).append(index)
    phrases = []
    for new, stages in changed.items():
        old = " / ".join(dict.fromkeys(describe_recompute(best.stages[index].recompute) for index in stages))
        where = "" if len(stages) == best.pp else f" in stage{'s' * (len(stages) > 1)} {format_ranges(stages)}"
        phrases.append(f"recompute {new} instead of {old}{where}")
    return phrases


def describe_difference(best: Plan, other: Plan) -> str:
    """What ``other`` does differently, in words; the differences that explain most come first."""
    changes = []
    if best.pp != other.pp:
        changes.append(f"{_count(other.pp, 'stage')} instead of {best.pp}")
    if (order := _pool_order(other)) != (ours := _pool_order(best)):
        unused = [pool for pool in dict.fromkeys(ours) if pool not in order]
        changes.append(
            f"without {', '.join(map(clean, unused))}"
            if unused
            else f"pools in the order {', '.join(map(clean, order))}"
        )
    changes += _degree_changes(best, other)
    if best.micro_batch_size != other.micro_batch_size:
        changes.append(f"microbatch {other.micro_batch_size} instead of {best.micro_batch_size}")
    if best.vpp != other.vpp:
        changes.append(f"vpp {other.vpp} instead of {best.vpp}")
    if best.pp == other.pp:
        changes += _layer_changes(best, other) + _recompute_changes(best, other)
    else:
        words = [dict.fromkeys(describe_recompute(stage.recompute) for stage in plan.stages) for plan in (best, other)]
        if list(words[0]) != list(words[1]):
            changes.append(f"recompute {_join(list(words[1]))} instead of {_join(list(words[0]))}")
    if not changes and [stage.nodes for stage in best.stages] != [stage.nodes for stage in other.stages]:
        changes.append("the same configuration on other nodes")
    return ", ".join(changes) or "the same configuration"


def list_alternatives(result: SearchResult, job: JobSpec, cluster: Cluster) -> tuple[tuple[Plan, Estimate], ...]:
    """The ranked plans after the best one, their gaps filled."""

    def key(plan: Plan) -> tuple[object, ...]:
        return (plan.stages, plan.micro_batch_size, plan.vpp)

    ranked = [(resolve(job, cluster, plan), estimate) for plan, estimate in result.ranked]
    best = key(resolve(job, cluster, result.plan)) if result.plan else ()
    return tuple((plan, estimate) for plan, estimate in ranked if key(plan) != best)


def list_caveats(plan: Plan, estimate: Estimate, job: JobSpec, cluster: Cluster) -> tuple[str, ...]:
    """Everything that was assumed, read in one of several ways, or should be known: each once, in order."""
    lines = (*job.notes, *cluster.readings, *plan.notes, *estimate.assumptions)
    return tuple(dict.fromkeys(clean(line) for line in lines))
