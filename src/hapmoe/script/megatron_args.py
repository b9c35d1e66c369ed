"""Argument vector of a Megatron-LM training program -> what is trained, and how it is split today.

Defaults are Megatron-LM's at main d98e8a64; ``arguments.py`` is megatron/training/arguments.py there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hapmoe.errors import InputError, Unsupported
from hapmoe.hybrid import FLAGS as HYBRID
from hapmoe.job import Argument, Present, Training
from hapmoe.model import ModelSpec
from hapmoe.plan import Recompute
from hapmoe.script.argv import Occurrence, argv_notes, own, parse_argv
from hapmoe.script.flags import REFUSED
from hapmoe.script.forks import NOTED, dialect_of
from hapmoe.script.noop import noop_layers, noop_layout, true_arguments
from hapmoe.script.settings import Reading, settings_of
from hapmoe.script.shape import read_model
from hapmoe.script.values import Token

__all__ = ["Allocation", "ReadArguments", "read_arguments"]

_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0}
_NOT_TRAINING = re.compile(
    r"(^|_)(generate|generation|inference|server|ptq|evaluat\w*|eval|convert\w*|converter|preprocess|analyze|merge|export"
    r"|quantize|prune|calibrate|huggingface|to_mg|to_hf)(_|$)|^hf2|2hf$|(^|_)hf_to_"
)
_STAGES = ("sft", "pt", "pretrain")  # MindSpeed's --stage; the others train against a second model
_NOT_A_DECODER = re.compile(
    r"(^|_)(bert|t5|ict|vision|retro|mamba|hybrid|mimo|biencoder|orqa|llava|multimodal|omni|clip|dino|inpaint)(_|$)"
    r"|(^|_|\d)v(l|lm|la)(_|$)"
)


@dataclass(frozen=True, slots=True)
class Allocation:
    """The devices that the script asks for, as far as it says."""

    world_size: int | None = None
    nodes: int | None = None
    devices_per_node: int | None = None


@dataclass(frozen=True, slots=True)
class ReadArguments:
    """All that the arguments say."""

    model: ModelSpec
    training: Training
    present: Present
    argv: tuple[Argument, ...]
    origin: dict[str, str]
    notes: tuple[str, ...]


def read_arguments(
    argv: Sequence[Token],
    *,
    entry: str = "pretrain_gpt.py",
    where: str = "",
    allocation: Allocation | None = None,
    vocab_size: int | None = None,
    imbalance: float | None = None,
    global_batch_size: int | None = None,
) -> ReadArguments:
    """Read ``argv`` of ``entry``. The three last are the user's own and beat the script.

    Raises InputError for what is missing, unknown or contradictory, Unsupported for models that
    cannot be planned.
    """
    occurrences = parse_argv(argv)
    hybrid = any(occurrence.name in HYBRID for occurrence in occurrences)
    _refuse(entry, occurrences, where, hybrid)
    reading = Reading(settings_of(occurrences), where)
    dialect = dialect_of([occurrence.name for occurrence in occurrences])
    model = read_model(reading, vocab_size=vocab_size, dialect=dialect)
    present = _present(reading, model, allocation or Allocation())
    batch = _global_batch(reading, present, global_batch_size)
    training = _training(reading, batch, imbalance)
    _note_what_is_not_modelled(reading, occurrences)
    if noops := noop_layers(reading):
        reading.notes.append(
            f"{reading.place('noop_layers')}: {len(noops)} of {reading.integer('num_layers')} layers do nothing; "
            f"--num-layers becomes {model.num_layers}, and the plan says which layers a stage holds"
        )
        argv = true_arguments(argv, occurrences, reading, noops)
    plans = ("global_batch_size", "rampup_batch_size", "step_batch_size_schedule") if global_batch_size else ()
    return ReadArguments(
        model=model,
        training=training,
        present=present,
        argv=own(argv, occurrences, plans),
        origin=reading.origin,
        notes=(*argv_notes(occurrences), *reading.notes),
    )


def _refuse(entry: str, occurrences: Sequence[Occurrence], where: str, hybrid: bool) -> None:
    program = entry.rsplit("/", 1)[-1].removesuffix(".py").rpartition(".")[2]
    for occurrence in occurrences:
        why = REFUSED.get(occurrence.spelling) or REFUSED.get(occurrence.name.replace("_", "-"))
        # A fork may give such a flag an empty default.
        if why and not (occurrence.values and occurrence.values[0].text in ("None", "none")):
            raise Unsupported(f"{occurrence.line or where}: {occurrence.name}: {why}")
        if occurrence.name == "--stage" and occurrence.values and (occurrence.values[0].text or "sft") not in _STAGES:
            raise Unsupported(f"{occurrence.line or where}: --stage {occurrence.values[0].text} is not modelled")
    if _NOT_TRAINING.search(program) or re.search(r"(^|/)tasks/", entry):
        raise Unsupported(f"{where}: {entry} does not train a Megatron model, as its name says")
    if _NOT_A_DECODER.search(program) and not (hybrid and program in ("pretrain_hybrid", "pretrain_mamba")):
        raise Unsupported(f"{where}: {entry} does not train a decoder-only (GPT) model, and only those are modelled")


# --------------------------------------------------------------------------- present configuration


def _present(reading: Reading, model: ModelSpec, allocation: Allocation) -> Present:
    tp = _degree(reading, "tensor_model_parallel_size", "tp")
    pp = _degree(reading, "pipeline_model_parallel_size", "pp")
    embedding = reading.switch("account_for_embedding_in_pipeline_split", "present.account_for_embedding")
    loss = reading.switch("account_for_loss_in_pipeline_split", "present.account_for_loss")
    layout = reading.word("pipeline_model_parallel_layout", "present.layout")
    noops = noop_layers(reading)
    if pattern := reading.word("hybrid_layer_pattern"):
        layout = _hybrid_layout(pattern, model)
    per_chunk = reading.integer("num_layers_per_virtual_pipeline_stage", "present.layers_per_virtual_stage")
    per_rank = reading.integer("num_virtual_stages_per_pipeline_rank", "present.vpp")
    if per_rank is None and layout is not None:
        per_rank = max(1, _layout_stages(layout) // pp)
    elif per_rank is None and per_chunk:
        per_rank = max(1, (model.num_layers + len(noops) + embedding + loss) // pp // per_chunk)
    if noops:
        reading.word("noop_layers", "present.layout")
        layout = noop_layout(reading, noops, pp, per_rank or 1, model.mtp_layers)
    sequence = reading.switch("sequence_parallel", "present.sequence_parallel")
    if sequence and tp == 1:
        reading.notes.append(f"{reading.place('sequence_parallel')} has no effect at tensor-parallel size 1")
    return Present(
        tp=tp,
        cp=_degree(reading, "context_parallel_size", "cp"),
        ep=_degree(reading, "expert_model_parallel_size", "ep"),
        etp=reading.integer("expert_tensor_parallel_size", "present.etp", "default (the tensor-parallel size)"),
        pp=pp,
        vpp=per_rank or 1,
        layers_per_virtual_stage=per_chunk,
        micro_batch_size=reading.integer("micro_batch_size", "present.micro_batch_size", "not given"),
        sequence_parallel=sequence and tp > 1,
        layout=layout,
        first_stage_layers=reading.integer("decoder_first_pipeline_num_layers", "present.first_stage_layers"),
        last_stage_layers=reading.integer("decoder_last_pipeline_num_layers", "present.last_stage_layers"),
        account_for_embedding=embedding,
        account_for_loss=loss,
        recompute=_recompute(reading),
        world_size=allocation.world_size,
        nodes=allocation.nodes,
        devices_per_node=allocation.devices_per_node,
    )


def _hybrid_layout(pattern: str, model: ModelSpec) -> str | None:
    """The split that pipes in a hybrid pattern make, as a layout; None without pipes, or inside a decoder layer."""
    segments = pattern.partition("/")[0].split("|")
    if len(segments) == 1 or any(len(segment) % 2 for segment in segments):
        return None
    return "E" + "|".join("t" * (len(segment) // 2) for segment in segments) + "m" * model.mtp_layers + "L"


def _degree(reading: Reading, key: str, name: str) -> int:
    value = reading.integer_or(key, 1, f"present.{name}")
    if value < 1:
        raise InputError(f"{reading.place(key)} is {value}", hint="give 1 or more")
    return value


def _layout_stages(layout: str) -> int:
    """Stages of a layout string (core/transformer/pipeline_parallel_layer_layout.py:266-321)."""
    text = re.sub(r"\(([^)]+)\)\*(\d+)", lambda match: match[1] * int(match[2]), layout.replace(",", ""))
    text = re.sub(r"(.)\*(\d+)", lambda match: match[1] * int(match[2]), text)
    return text.count("|") + 1


def _recompute(reading: Reading) -> Recompute:
    """--recompute-* as Megatron resolves them, and what came before them (until 23.04)."""
    granularity = reading.word("recompute_granularity", "present.recompute")
    method = reading.word("recompute_method")
    modules = reading.words("recompute_modules")
    old = reading.switch("checkpoint_activations")
    if granularity is None and (old or (method and reading.settings["recompute_method"].name != "--recompute-method")):
        granularity, method = "full", method or "uniform"
    if reading.switch("recompute_activations"):  # beats the granularity (arguments.py:608)
        granularity = "selective"
    if reading.switch("moe_layer_recompute"):  # transformer_config.py:2014-2025
        granularity, modules = granularity or "selective", (*(modules or ("core_attn",)), "moe")
    if granularity == "selective":
        return Recompute(granularity="selective", modules=tuple(dict.fromkeys(modules)) or ("core_attn",))
    if granularity == "full":
        layers = reading.integer("recompute_num_layers")
        if layers is not None and reading.given("hybrid_layer_pattern"):  # counts attention and MLP apart
            layers = -(-layers // 2)
        return Recompute(
            granularity="full",
            method="block" if method == "block" else "uniform" if method else None,
            num_layers=1 if layers is None and old else layers or 0,
        )
    return Recompute()


# ------------------------------------------------------------------------------------------- batch


def _global_batch(reading: Reading, present: Present, option: int | None) -> int:
    into = "training.global_batch_size"
    if option is not None:
        reading.origin[into] = "option --global-batch-size"
        return option
    given = reading.integer("global_batch_size", into, "not given")
    if reading.given("rampup_batch_size"):
        reading.notes.append(f"{reading.place('rampup_batch_size')}: the plan is for the final global batch size")
    if given is not None:
        if given < 1:
            raise InputError(f"{reading.place('global_batch_size')} is {given}", hint="give 1 or more")
        return given
    if reading.given("step_batch_size_schedule"):
        return _last_of_schedule(reading, into)
    model_ranks = present.tp * present.cp * present.pp
    if present.world_size and present.micro_batch_size and present.world_size % model_ranks == 0:
        dp = present.world_size // model_ranks
        batch = present.micro_batch_size * dp
        reading.origin[into] = f"default (micro batch {present.micro_batch_size} x data-parallel size {dp})"
        reading.notes.append(
            f"--global-batch-size is absent: Megatron takes micro batch x data-parallel size, {batch} as the script "
            "stands; the plan keeps that and writes it down, since it would otherwise change with the plan"
        )
        return batch
    reading.notes.append(
        "--global-batch-size is absent and Megatron's default (micro batch x data-parallel size) is not known from the "
        "script: give it"
    )
    return 0


def _last_of_schedule(reading: Reading, into: str) -> int:
    text = reading.word("step_batch_size_schedule", into) or ""
    last = text.replace(",", " ").split()[-1:]
    match = re.fullmatch(r"[^:]+:(\d+)", last[0]) if last else None
    if not match:
        raise InputError(f"{reading.place('step_batch_size_schedule')}: {text!r} does not end in THRESHOLD:SIZE")
    reading.notes.append(f"{reading.place('step_batch_size_schedule')}: the plan is for its last size, {match[1]}")
    return int(match[1])


# ---------------------------------------------------------------------------------------- training


def _training(reading: Reading, batch: int, imbalance: float | None) -> Training:
    precision = _precision(reading)
    aware = reading.switch("use_precision_aware_optimizer", "training.precision_aware_optimizer")
    grad_bytes = _grad_bytes(reading, precision)
    transformer_engine = (reading.word("transformer_impl", "training.transformer_engine") or "") != "local"
    dispatcher = reading.word("moe_token_dispatcher_type", "training.dispatcher") or "allgather"
    offload = reading.switch("optimizer_cpu_offload", "training.optimizer_offload_fraction")
    fraction = reading.number("optimizer_offload_fraction")
    if imbalance is not None:
        reading.origin["training.imbalance"] = "option --imbalance"

    def state_bytes(key: str) -> float:
        # Other types than fp32 need the precision-aware optimizer (optimizer_config.py:434-478).
        return _BYTES[reading.word(f"{key}_dtype", f"training.{key}_bytes") or "fp32"] if aware else 4.0

    return Training(
        seq_len=reading.integer_or("seq_length", 0, "training.seq_len"),
        global_batch_size=batch,
        precision=precision,
        fp8_recipe=_fp8(reading),
        fp4=bool(reading.word("fp4_format", "training.fp4")),
        fp8_param_gather=reading.switch("fp8_param_gather", "training.fp8_param_gather"),
        optimizer=reading.word("optimizer", "training.optimizer") or "adam",
        distributed_optimizer=reading.switch("use_distributed_optimizer", "training.distributed_optimizer")
        or reading.integer_or("zero_stage", 0) > 0,
        precision_aware_optimizer=aware,
        main_params_bytes=state_bytes("main_params"),
        main_grads_bytes=state_bytes("main_grads"),
        exp_avg_bytes=state_bytes("exp_avg"),
        exp_avg_sq_bytes=state_bytes("exp_avg_sq"),
        optimizer_offload_fraction=(1.0 if fraction is None else fraction) if offload else 0.0,
        grad_bytes=grad_bytes,
        grad_reduce_bytes=grad_bytes,
        overlap_grad_reduce=reading.switch("overlap_grad_reduce", "training.overlap_grad_reduce"),
        overlap_param_gather=reading.switch("overlap_param_gather", "training.overlap_param_gather"),
        tp_comm_overlap=reading.switch("tp_comm_overlap", "training.tp_comm_overlap"),
        overlap_p2p=reading.switch("overlap_p2p_comm", "training.overlap_p2p", default=True),
        flash_attention=_flash(reading, transformer_engine),
        softmax_fusion=reading.switch("masked_softmax_fusion", "training.softmax_fusion", default=True),
        transformer_engine=transformer_engine,
        cp_comm_type=_cp_comm(reading),
        # alltoall_seq was alltoall with another order of the sequence split, until 0.16.
        dispatcher="alltoall" if dispatcher == "alltoall_seq" else dispatcher,
        flex_backend=reading.word("moe_flex_dispatcher_backend", "training.flex_backend") or "deepep",
        grouped_gemm=reading.switch("moe_grouped_gemm", "training.grouped_gemm"),
        router_dtype=reading.word("moe_router_dtype", "training.router_dtype"),
        permute_fusion=reading.switch("moe_permute_fusion", "training.permute_fusion"),
        shared_expert_overlap=reading.switch("moe_shared_expert_overlap", "training.shared_expert_overlap"),
        overlap_moe_comm=reading.switch("overlap_moe_expert_parallel_comm", "training.overlap_moe_comm"),
        delay_wgrad=reading.switch("delay_wgrad_compute", "training.delay_wgrad"),
        cuda_graphs=_cuda_graphs(reading),
        cross_entropy_fusion=reading.switch("cross_entropy_loss_fusion", "training.cross_entropy_fusion"),
        per_token_loss=reading.switch("calculate_per_token_loss", "training.per_token_loss"),
        microbatch_group_size=reading.integer(
            "microbatch_group_size_per_virtual_pipeline_stage", "training.microbatch_group_size"
        ),
        imbalance=imbalance,
    )


def _precision(reading: Reading) -> str:
    bf16, fp16 = reading.switch("bf16"), reading.switch("fp16")
    if bf16 and fp16:
        where = reading.settings["fp16"].where
        raise InputError("--bf16 and --fp16 exclude each other (arguments.py:1196)", where=where)
    name = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    reading.origin["training.precision"] = reading.place(name) if name in reading.settings else "default"
    return name


def _fp8(reading: Reading) -> str | None:
    given = reading.given("fp8_format") or reading.switch("fp8_hybrid") or reading.switch("fp8_e4m3")
    if not given:
        return None
    recipe = reading.word("fp8_recipe", "training.fp8_recipe") or "delayed"
    if recipe == "custom":
        raise Unsupported(f"{reading.place('fp8_recipe')}: what a custom recipe costs is not known")
    return recipe


def _grad_bytes(reading: Reading, precision: str) -> float:
    """Under bf16 gradients add up in fp32 unless told otherwise, under fp16 in fp16 (arguments.py:1205-1217)."""
    if precision == "fp32" or reading.switch("accumulate_allreduce_grads_in_fp32", "training.grad_bytes"):
        return 2.0 if precision == "bf16" and reading.switch("grad_reduce_in_bf16", "training.grad_bytes") else 4.0
    if precision == "fp16":
        return 2.0
    if reading.switch("grad_reduce_in_bf16", "training.grad_bytes"):
        return 2.0
    return 2.0 if reading.word("main_grads_dtype", "training.grad_bytes") == "bf16" else 4.0


def _flash(reading: Reading, transformer_engine: bool) -> bool:
    """Is the attention kernel one that keeps no S x S matrix?"""
    backend = reading.word("attention_backend", "training.flash_attention")
    if backend in ("unfused", "local"):
        return False
    return transformer_engine or reading.switch("use_flash_attn", "training.flash_attention")


def _cuda_graphs(reading: Reading) -> str:
    """Nothing, the static part of layers, or a whole iteration (arguments.py:--cuda-graph-impl, --cuda-graph-scope)."""
    into = "training.cuda_graphs"
    impl = reading.word("cuda_graph_impl", into) or "none"
    used = impl != "none"
    used = reading.switch("enable_cuda_graph", into) or reading.switch("external_cuda_graph", into) or used
    if not used:
        return "none"
    return "full" if impl == "full_iteration" or "full_iteration" in reading.words("cuda_graph_scope") else "layers"


def _cp_comm(reading: Reading) -> str:
    kinds = reading.words("cp_comm_type")
    reading.word("cp_comm_type", "training.cp_comm_type")
    if len(set(kinds)) > 1:
        reading.notes.append(f"{reading.place('cp_comm_type')}: differs per layer; {kinds[0]} is taken for all")
    return kinds[0] if kinds else "p2p"


# ------------------------------------------------------------------------------------------- notes

_NOT_MODELLED = {
    "--use-megatron-fsdp": "fully sharded data parallelism is estimated as the distributed optimizer is",
    "--use-custom-fsdp": "fully sharded data parallelism is estimated as the distributed optimizer is",
    "--use-torch-fsdp2": "fully sharded data parallelism is estimated as the distributed optimizer is",
    "--deepspeed": "a DeepSpeed launch: ZeRO stages above 1 and its own parallel flags are not interpreted",
    "--cpu-offloading-num-layers": "activations kept in host memory are counted as kept on the device",
    "--fine-grained-activation-offloading": "activations kept in host memory are counted as kept on the device",
    "--tensor-parallel-num-weight-shards": "weight shards beyond the tensor-parallel size are not modelled",
    "--expert-tensor-parallel-num-weight-shards": "weight shards beyond the tensor-parallel size are not modelled",
    "--enable-mhc-connections": "the extra residual streams are not modelled",
    "--hybrid-context-parallel": "context-parallel sizes that vary per sequence are not modelled",
    "--use-checkpoint-args": "Megatron takes the shape from the checkpoint; the script's is believed here",
}
_DROPPED = {
    "distribute_saved_activations": "it needs full recomputation without sequence parallelism",
    "use_mp_args_from_checkpoint_args": "the checkpoint's parallel sizes would replace the plan's",
    "num_layer_list": "the plan says which layers a stage holds",
    "use_tp_pp_dp_mapping": "the plan places stages on consecutive ranks",
    "hierarchical_context_parallel_sizes": "their product has to be the plan's context-parallel size",
}


def _note_what_is_not_modelled(reading: Reading, occurrences: Sequence[Occurrence]) -> None:
    for occurrence in occurrences:
        why = _NOT_MODELLED.get(occurrence.spelling) or NOTED.get(occurrence.name.replace("_", "-"))
        if why:
            reading.notes.append(f"{occurrence.where}: {occurrence.name}: {why}")
    for key, why in _DROPPED.items():
        if reading.given(key):
            reading.notes.append(f"{reading.place(key)} is dropped: {why}")
    if reading.integer_or("num_distributed_optimizer_instances", 1) > 1:
        reading.notes.append(
            f"{reading.place('num_distributed_optimizer_instances')}: the optimizer is estimated as one instance"
        )
