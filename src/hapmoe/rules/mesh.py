"""Degrees: the two meshes of a stage, and what tensor, context and expert parallelism divide."""

from __future__ import annotations

from collections.abc import Iterator

from hapmoe.plan import Stage
from hapmoe.rules.base import Broken, Context, Rule, degrees

__all__ = ["FORM", "RULES"]

Found = Iterator[Broken]


def _whole(c: Context) -> Found:
    if not c.plan.stages:
        yield Broken("the plan has no stages")
    if c.plan.vpp < 1:
        yield Broken(f"vpp is {c.plan.vpp}", "vpp 1 is a pipeline without interleaving")
    for index, stage in enumerate(c.plan.stages):
        for name in ("tp", "cp", "ep", "etp", "dp", "micro_batch_size"):
            if (value := getattr(stage, name)) < 1:
                yield Broken(f"{name} is {value}", f"set {name} to 1 or more", index)
        if stage.num_layers < 0 or stage.mtp_layers < 0:
            yield Broken(f"{stage.num_layers} layers and {stage.mtp_layers} MTP layers", stage=index)


def _known_pools(c: Context) -> Found:
    names = [pool.name for pool in c.cluster.pools]
    for index, stage in enumerate(c.plan.stages):
        if stage.pool not in names:
            yield Broken(f"no pool {stage.pool!r} in the cluster", f"one of {', '.join(names)}", index)


def _devices(c: Context) -> Found:
    for index, stage in c.meshes():
        product = stage.tp * stage.cp * stage.dp
        if stage.num_devices != product:
            yield Broken(
                f"TP·CP·DP = {stage.tp}·{stage.cp}·{stage.dp} = {product}, "
                f"but the stage has {stage.num_devices} devices",
                f"give the stage {product} devices, or change dp",
                index,
            )


def _uniform(c: Context) -> Found:
    if c.backend.per_stage_degrees or len({degrees(stage) for stage in c.plan.stages}) == 1:
        return
    names = ("tp", "cp", "ep", "etp", "dp", "num_devices", "micro_batch_size")
    for name in names:
        values = [getattr(stage, name) for stage in c.plan.stages]
        if len(set(values)) > 1:
            yield Broken(
                f"{name} differs between stages ({', '.join(map(str, values))}); "
                f"back end {c.backend.name} takes one value for all",
                "give all stages the same degrees, or plan with --backend any (not launchable)",
            )


def _expert_mesh(c: Context) -> Found:
    for index, stage in c.meshes():
        product = stage.etp * stage.ep
        if stage.num_devices % product == 0:
            continue
        if index is None:
            pp = c.plan.pp
            left = f"EP·ETP·PP = {stage.ep}·{stage.etp}·{pp} = {product * pp}"
            right = stage.num_devices * pp
        else:
            left, right = f"EP·ETP = {stage.ep}·{stage.etp} = {product}", stage.num_devices
        if product > stage.num_devices:
            relation = f"{left} > {right} devices"
        else:
            relation = f"{left} does not divide {right} devices"
        yield Broken(relation + _etp_note(c, stage), _expert_hint(c, stage), index)


def _etp_note(c: Context, stage: Stage) -> str:
    if c.job.present.etp is None and stage.etp == stage.tp > 1:
        return f"; ETP not given means TP = {stage.tp}"
    return ""


def _expert_hint(c: Context, stage: Stage) -> str:
    if stage.etp > 1 and stage.num_devices % stage.ep == 0:
        return "set --expert-tensor-parallel-size 1"
    experts = c.job.model.moe.num_experts if c.job.model.moe else 1
    fitting = [n for n in range(1, stage.num_devices + 1) if stage.num_devices % n == 0 and experts % n == 0]
    etp = " and --expert-tensor-parallel-size 1" if stage.etp > 1 else ""
    return f"set --expert-model-parallel-size {max(fitting, default=1)}{etp}"


def _expert_count(c: Context) -> Found:
    moe = c.job.model.moe
    for index, stage in c.meshes():
        if moe is None and stage.ep > 1:
            yield Broken(f"EP = {stage.ep}, but the model has no experts", "set ep to 1", index)
        elif moe is not None and moe.num_experts % stage.ep:
            yield Broken(
                f"{moe.num_experts} experts do not divide by EP = {stage.ep}", "choose a divisor of the experts", index
            )


def _expert_tensor_alone(c: Context) -> Found:
    if c.job.model.moe is None:
        return
    for index, stage in c.meshes():
        # tensor_parallel/layers.py:829,886: with EP 1 expert weights count as dense ones, so their gradients are
        # reduced over the dense group: replicas across tp are missed (ETP < TP), shards are mixed (ETP > TP).
        if stage.ep == 1 and stage.etp != stage.tp:
            yield Broken(
                f"EP = 1 with ETP = {stage.etp}, TP = {stage.tp}",
                f"set etp to {stage.tp}, or use expert parallelism (ep > 1)",
                index,
            )


def _heads(c: Context) -> Found:
    for index, stage in c.meshes():
        if c.job.model.num_heads % stage.tp:
            yield Broken(
                f"{c.job.model.num_heads} attention heads do not divide by TP = {stage.tp}",
                "choose a divisor of the heads",
                index,
            )


def _query_groups(c: Context) -> Found:
    model = c.job.model
    if model.mla is not None:
        return
    groups = model.num_kv_heads
    if groups < 1 or model.num_heads % groups:
        yield Broken(f"{model.num_heads} attention heads do not divide into {groups} query groups")
        return
    for index, stage in c.meshes():
        if groups % stage.tp == 0:
            continue
        if stage.tp % groups:
            yield Broken(
                f"{groups} query groups are neither a multiple nor a divisor of TP = {stage.tp}",
                "choose a divisor of the query groups",
                index,
            )
        elif not c.job.training.transformer_engine:
            yield Broken(
                f"{groups} query groups do not divide by TP = {stage.tp}, which local attention needs",
                "lower tp, or use --transformer-impl transformer_engine",
                index,
            )


def _widths(c: Context) -> Found:
    model, moe = c.job.model, c.job.model.moe
    for index, stage in c.meshes():
        if not all(model.moe_pattern) and model.ffn_hidden % stage.tp:
            yield Broken(f"FFN width {model.ffn_hidden} does not divide by TP = {stage.tp}", stage=index)
        if moe is not None and moe.ffn_hidden % stage.etp:
            yield Broken(f"expert FFN width {moe.ffn_hidden} does not divide by ETP = {stage.etp}", stage=index)
        if moe is not None and moe.shared_ffn_hidden % stage.tp:
            yield Broken(f"shared-expert width {moe.shared_ffn_hidden} does not divide by TP = {stage.tp}", stage=index)
        if model.padded_vocab_size is not None and model.padded_vocab_size % stage.tp:
            yield Broken(f"padded vocabulary {model.padded_vocab_size} does not divide by TP = {stage.tp}", stage=index)


def _expert_bias(c: Context) -> Found:
    if c.job.model.moe is None or not c.job.model.linear_bias:
        return
    for index, stage in c.meshes():
        if stage.etp > 1:
            yield Broken(
                f"ETP = {stage.etp}, but the experts have linear biases",
                "set etp to 1, or --disable-bias-linear in the script",
                index,
            )


def _context(c: Context) -> Found:
    training = c.job.training
    for index, stage in c.meshes():
        if stage.cp == 1:
            continue
        if not c.backend.cp:
            yield Broken(f"CP = {stage.cp}; back end {c.backend.name} has no context parallelism", "set cp to 1", index)
        if training.seq_len % (2 * stage.cp):
            yield Broken(
                f"sequence length {training.seq_len} does not divide by 2·CP = {2 * stage.cp}", "lower cp", index
            )


def _context_attention(c: Context) -> Found:
    if c.job.training.transformer_engine:
        return
    for index, stage in c.meshes():
        if stage.cp > 1:
            yield Broken(
                f"CP = {stage.cp} with local attention",
                "set cp to 1, or use --transformer-impl transformer_engine",
                index,
            )


def _context_heads(c: Context) -> Found:
    if c.job.training.cp_comm_type != "a2a":
        return
    for index, stage in c.meshes():
        if stage.cp > 1 and c.job.model.num_heads % (stage.tp * stage.cp):
            yield Broken(
                f"{c.job.model.num_heads} heads do not divide by TP·CP = {stage.tp}·{stage.cp} (--cp-comm-type a2a)",
                "lower cp, or use --cp-comm-type p2p",
                index,
            )


def _sequence(c: Context) -> Found:
    seq_len = c.job.training.seq_len
    for index, stage in c.meshes():
        if c.sequence_parallel(stage) and (seq_len % stage.cp or (seq_len // stage.cp) % stage.tp):
            yield Broken(
                f"with sequence parallelism the sequence of one rank, {seq_len}/{stage.cp}, "
                f"must divide by TP = {stage.tp}",
                "lower tp or cp",
                index,
            )


def _tp_overlap(c: Context) -> Found:
    if not c.job.training.tp_comm_overlap:
        return
    for index, stage in c.meshes():
        if not c.sequence_parallel(stage):
            why = "TP = 1 switches it off" if stage.tp == 1 else "--sequence-parallel is not given"
            yield Broken(f"--tp-comm-overlap needs sequence parallelism, and {why}", "remove --tp-comm-overlap", index)


def _dispatcher(c: Context) -> Found:
    training = c.job.training
    peers = training.dispatcher == "flex" and training.flex_backend in ("deepep", "ncclep")
    if c.job.model.moe is None or not peers:
        return
    for index, stage in c.meshes():
        if stage.etp * stage.ep == 1:
            yield Broken(
                f"the flex dispatcher with {training.flex_backend} needs ETP·EP > 1, and it is 1",
                "set ep above 1, or --moe-token-dispatcher-type alltoall",
                index,
            )


def _expert_overlap(c: Context) -> Found:
    if not c.job.training.overlap_moe_comm:
        return
    flag = "--overlap-moe-expert-parallel-comm"
    for index, stage in c.meshes():
        if stage.ep == 1:
            yield Broken(f"{flag} needs EP > 1", f"set ep above 1, or remove {flag}", index)
    if c.plan.pp > 1 and c.plan.vpp == 1:
        yield Broken(f"{flag} with PP = {c.plan.pp} needs virtual stages", "set vpp to 2 or more")
    if c.job.model.mtp_layers > 1:
        yield Broken(f"{flag} allows 1 MTP layer, and the model has {c.job.model.mtp_layers}")
    if c.job.model.mtp_layers == 1 and c.plan.pp == 1:
        yield Broken(f"{flag} with an MTP layer needs PP > 1", "set pp to 2 or more")


FORM = (
    Rule("degrees", "every size is a positive count", "A:432", _whole),
    Rule("pool", "a stage runs on devices that exist", "cluster file", _known_pools),
)

RULES = (
    Rule("devices", "the world is the product of its degrees", "A:432; PS:823", _devices),
    Rule("uniform", "upstream builds one mesh for all stages", "PS:859", _uniform),
    Rule("expert-mesh", "experts are a second mesh over the same ranks of a stage", "PS:882", _expert_mesh),
    Rule("experts", "every rank of an EP group holds equally many experts", "A:1656; A:1657; TC:1596", _expert_count),
    Rule(
        "expert-tensor",
        "trains with wrong gradients: expert replicas diverge",
        "measured on megatron-core 0.16.1; tensor_parallel/layers.py:829",
        _expert_tensor_alone,
    ),
    Rule("heads", "each tensor-parallel rank holds whole heads", "TC:1447", _heads),
    Rule(
        "query-groups",
        "key/value heads are split or repeated evenly over TP",
        "TC:1465; attention.py:358; dot_product_attention.py:81",
        _query_groups,
    ),
    Rule("widths", "split weights have equal parts", "core/utils.py:592; tensor_parallel/layers.py:1038,1408", _widths),
    Rule("expert-bias", "biases of split experts would be added ETP times", "TC:2613", _expert_bias),
    Rule("context", "each rank takes two equal chunks of the sequence", "A:1336", _context),
    Rule(
        "context-attention",
        "only Transformer Engine's attention is context parallel",
        "dot_product_attention.py:57",
        _context_attention,
    ),
    Rule(
        "context-heads",
        "all-to-all attention splits heads over CP",
        "Transformer Engine, a2a attention",
        _context_heads,
    ),
    Rule("sequence", "sequence parallelism scatters the sequence over TP", "tensor_parallel/mappings.py:72", _sequence),
    Rule("tp-overlap", "the overlapped all-gathers are those of sequence parallelism", "A:1442", _tp_overlap),
    Rule("dispatcher", "DeepEP and NCCL-EP need somebody to talk to", "TD:1836; TD:1864", _dispatcher),
    Rule("expert-overlap", "all-to-all hides behind another microbatch", "TC:3008; TC:3013; TC:3042", _expert_overlap),
)
