"""What may be computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator

from hapmoe.backends import version_tuple
from hapmoe.hybrid import pattern_of
from hapmoe.job import JobSpec
from hapmoe.plan import Recompute
from hapmoe.rules.base import Broken, Context, Rule, flag_values

__all__ = ["RULES", "cannot_recompute"]

Found = Iterator[Broken]


def _stages(c: Context) -> Iterator[tuple[int | None, Recompute]]:
    """Each recomputation once; without a stage number where all stages have the same."""
    settings = [stage.recompute for stage in c.plan.stages]
    if all(setting == settings[0] for setting in settings):
        yield None, settings[0]
    else:
        yield from enumerate(settings)


def _form(c: Context) -> Found:
    for index, r in _stages(c):
        if r.granularity == "full":
            if r.method is None:
                yield Broken("full recomputation without a method", "set method to block or uniform", index)
            if r.num_layers < 1:
                yield Broken(
                    f"full recomputation of {r.num_layers} layers (uniform would never end)", "set num_layers", index
                )
            if r.modules:
                yield Broken("full recomputation takes no modules", "use granularity selective", index)
        elif r.method is not None or r.num_layers:
            yield Broken(f"granularity {r.granularity} takes no method and no num_layers", stage=index)
        elif r.granularity == "none" and r.modules:
            yield Broken("modules without recomputation", "use granularity selective", index)


def _modules(c: Context) -> Found:
    known = c.backend.recompute_modules
    for index, r in _stages(c):
        for module in r.modules:
            if module not in known:
                yield Broken(f"no module {module!r}", f"one of {', '.join(known)}", index)
            elif c.before(known[module]) and module != "core_attn":
                yield Broken(
                    f"module {module} needs Megatron-Core {known[module]}, "
                    f"the job runs {c.job.training.megatron_version}",
                    stage=index,
                )


def _needs(c: Context) -> Found:
    training, model = c.job.training, c.job.model
    for index, r in _stages(c):
        if "moe_act" in r.modules and not training.grouped_gemm:
            yield Broken("module moe_act without --moe-grouped-gemm", "recompute other modules", index)
        if "mla_up_proj" in r.modules and model.mla is None:
            yield Broken("module mla_up_proj without multi-latent attention", "recompute other modules", index)
        if "shared_experts" in r.modules and training.shared_expert_overlap:
            yield Broken("module shared_experts with --moe-shared-expert-overlap", "recompute other modules", index)
        if training.fp8_recipe == "delayed" and {"moe_act", "layernorm"} & set(r.modules):
            yield Broken("modules moe_act and layernorm with delayed FP8 scaling", "recompute other modules", index)


def _overlap(c: Context) -> Found:
    if not c.job.training.overlap_moe_comm:
        return
    for index, r in _stages(c):
        if "moe" in r.modules:
            said = "module moe with --overlap-moe-expert-parallel-comm"
            yield Broken(said, "recompute modules other than moe", index)


def cannot_recompute(job: JobSpec, r: Recompute) -> str:
    """Why the job's own arguments exclude this recomputation; empty: they do not. The search asks too."""
    training, full = job.training, r.granularity == "full"
    if full and training.cuda_graphs == "layers":
        return "full recomputation under CUDA graphs of layers (--cuda-graph-impl)"
    if full and flag_values(job, "--enable-mhc-connections") is not None:
        return "full recomputation with --enable-mhc-connections"
    if full and training.overlap_moe_comm:
        return "full recomputation with --overlap-moe-expert-parallel-comm"
    if full and pattern_of(job) is not None and _before(job, "0.18.0"):
        return f"full recomputation of a HybridModel, which Megatron-Core {training.megatron_version} leaves out"
    if r.granularity != "none" and flag_values(job, "--cpu-offloading-num-layers") is not None:
        return "recomputation with --cpu-offloading-num-layers"
    offloaded = set(flag_values(job, "--offload-modules") or ())
    inside = sorted(offloaded & {"moe_act", "expert_fc1", "fused_group_mlp"})
    if "moe" in r.modules and inside and flag_values(job, "--fine-grained-activation-offloading") is not None:
        return f"module moe with --offload-modules {' '.join(inside)}, which lie inside it"
    if r.granularity == "selective" and training.cuda_graphs != "none":
        return _graphed(job, r.modules)
    return ""


def _graphed(job: JobSpec, modules: tuple[str, ...]) -> str:
    """Selective recomputation under CUDA graphs: nothing random in a graphed module, no module around a graph."""
    scope = set(flag_values(job, "--cuda-graph-scope") or flag_values(job, "--cuda-graph-modules") or ())
    whole = not scope - {"full"} or "full_iteration" in scope
    impl = (flag_values(job, "--cuda-graph-impl") or ("local",))[-1:]
    external = flag_values(job, "--external-cuda-graph") is not None or impl == ("transformer_engine",)
    if "moe" in modules and external and "moe_router" in scope:
        return "module moe around a CUDA graph of moe_router (--cuda-graph-impl transformer_engine)"
    for module, part, flag in (
        ("core_attn", "attn", "--attention-dropout"),
        ("mlp", "mlp", "--hidden-dropout"),
        ("moe", "moe", "--hidden-dropout"),
    ):
        dropout = (flag_values(job, flag) or ("0.1",))[-1]  # Megatron's default
        if module in modules and (whole or part in scope) and dropout.strip("0.") != "":
            return f"module {module} inside a CUDA graph, with {flag} {dropout}"
    return ""


def _before(job: JobSpec, version: str) -> bool:
    given = job.training.megatron_version
    return given is not None and version_tuple(given) < version_tuple(version)


def _arguments(c: Context) -> Found:
    for index, r in _stages(c):
        if why := cannot_recompute(c.job, r):
            yield Broken(why, "other recomputation, or another argument", index)


def _mtp(c: Context) -> Found:
    for index, stage in enumerate(c.plan.stages):
        r = stage.recompute
        if stage.mtp_layers and r.granularity == "full" and r.method == "uniform" and r.num_layers != 1:
            yield Broken(
                f"uniform recomputation in units of {r.num_layers} on the stage with MTP layers",
                "units of 1, or method block",
                index,
            )


def _units(c: Context) -> Found:
    if not c.before("0.17.0") and not c.backend.before_version:  # from there the last unit is cut short
        return
    for index, stage in enumerate(c.plan.stages):
        r = stage.recompute
        counts = sorted({count for _, count in stage.virtual_layers})
        if r.granularity != "full" or r.method != "uniform" or r.num_layers < 1:
            continue
        if broken := [count for count in counts if count % r.num_layers]:
            yield Broken(
                f"units of {r.num_layers} do not divide the {broken[0]} layers of "
                f"{'a virtual stage' if c.plan.vpp > 1 else 'the stage'}; Megatron-Core before 0.17 runs past them",
                "method block, or units that divide",
                index,
            )


def _per_stage(c: Context) -> Found:
    if not c.backend.per_stage_recompute and len({stage.recompute for stage in c.plan.stages}) > 1:
        yield Broken(f"stages recompute differently; back end {c.backend.name} takes one setting for all")


RULES = (
    Rule("recompute", "full needs a method and a count, selective neither", "TC:1914; TC:1920; TC:1929; A:1426", _form),
    Rule("recompute-modules", "only what Megatron can discard", "TC:1959", _modules),
    Rule(
        "recompute-needs", "a module must exist in the model as trained", "TC:1965; TC:1970; TC:1996; TC:2003", _needs
    ),
    Rule("recompute-overlap", "recomputation would repeat the hidden all-to-all", "TC:3024", _overlap),
    Rule(
        "recompute-arguments",
        "arguments of the script that exclude some recomputation",
        "TC:1897; TC:2070; TC:2163; TC:2855-2900; TC:3021; hybrid_block.py:360",
        _arguments,
    ),
    Rule("recompute-mtp", "MTP layers are recomputed one by one", "multi_token_prediction.py:1625", _mtp),
    Rule(
        "recompute-units",
        "before 0.17 the last unit is not cut short: IndexError in the forward pass",
        "transformer_block.py:534-542 of core_r0.12.0 to core_r0.16.0",
        _units,
    ),
    Rule("recompute-stages", "the runtime must take settings per stage", "back end", _per_stage),
)
