"""A published training result (a row of the truth files' format) as job, cluster and plan.

What a row does not state is taken as the framework's own habit (``bench.habits``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml

from bench.habits import recompute_of, sequence_parallel, training_of
from hapmoe.catalog import find_device
from hapmoe.cluster import Cluster, Network, Pool
from hapmoe.errors import HapmoeError
from hapmoe.job import JobSpec, Present
from hapmoe.model import Mla, ModelSpec, Moe
from hapmoe.options import Options
from hapmoe.plan import Plan, Stage
from hapmoe.pricing import price

__all__ = ["Case", "Skip", "case_of", "group_of", "load", "stated_step_s"]

DEVICES = (
    (r"^gb300", "gb300-288g"),
    (r"^gb200", "gb200-186g"),
    (r"^gh200", "gh200-96g"),
    (r"^b300", "b300-288g-sxm"),
    (r"^b200", "b200-180g-sxm"),
    (r"^h100", "h100-80g-sxm"),
    (r"^h200", "h200-141g-sxm"),
    (r"^h800", "h800-80g-sxm"),
    (r"^h20\b", "h20-96g-sxm"),
    (r"^a100-40g", "a100-40g-sxm"),
    (r"^a100", "a100-80g-sxm"),
    (r"^a800", "a800-80g-sxm"),
    (r"^v100-16g", "v100-16g-sxm"),
    (r"^v100", "v100-32g-sxm"),
    (r"^t4", "t4-16g"),
    (r"^l40s", "l40s-48g"),
    (r"^mi250", "mi250x-gcd-64g"),
    (r"^mi300x", "mi300x-192g"),
    (r"^mi325x", "mi325x-256g"),
    (r"^mi355x", "mi355x-288g"),
    (r"^intel max 1550", "max1550-tile-64g"),
    (r"^ascend 910b", "ascend-910b-376t"),
    (r"rtx[- ]?3090", "rtx3090-24g"),
    (r"titan", "titan-rtx-24g"),
    (r"rtx[- ]?2080", "rtx2080ti-11g"),
)
NETWORKS = (
    # what a row states of its nodes' network -> (NICs per node, 0: as many as it says; bytes per second of one; kind)
    (r"(\d+) ?x ?200 ?g hdr", 0, 25e9, ""),
    (r"(\d+) ?x ?50 gb/s", 0, 50e9, ""),
    (r"(\d+)x connectx-8.*800", 0, 100e9, ""),
    (r"(\d+)x connectx-7.*400", 0, 50e9, ""),
    (r"(\d+) ?x ?100 ?gb roce", 0, 12.5e9, ""),
    (r"(\d+) omni-path", 0, 12.5e9, "omni-path"),
    (r"omni-path", 4, 12.5e9, "omni-path"),
    (r"efa 16 per node", 16, 50e9, "efa"),
    (r"^50 gb/s", 1, 6.25e9, ""),
    (r"(\d+)x slingshot", 0, 25e9, ""),
    (r"^1 gb/s", 1, 0.125e9, ""),
)


RECIPE_LAYOUT = re.compile(r"(nemo|megatron-bridge).*(deep-?seek-?v3|kimi)", re.I)
"""Recipes that state a pipeline layout: "Et*4|(t*4|)*14tmL" of 61 layers on 16 chunks, "Et|(tt|)*30mL" on 32
(Megatron-Bridge recipes/deepseek/deepseek_v3.py, recipes/kimi/kimi_k2.py: set_…_pipeline_model_parallel_layout)."""


GROUPS = {r"deep-?seek-?v3": (8, 4), r"deep-?seek-?v2": (8, 3)}
"""Groups of experts, and how many of them a token's experts come from: n_group and topk_group of the models'
configurations on Hugging Face (deepseek-ai/DeepSeek-V3, DeepSeek-V2)."""
SPARSE = re.compile(r"glm-?5", re.I)
"""Models that attend to chosen tokens: their flags are refused in scripts too."""


class Skip(Exception):
    """Why a row cannot be predicted."""


@dataclass(frozen=True, slots=True)
class Case:
    """What ``evaluate`` needs."""

    job: JobSpec
    cluster: Cluster
    plan: Plan

    @property
    def key(self) -> bytes:
        """Equal for rows that are the same to a model: name apart, everything that it is told."""
        job = msgspec.structs.replace(self.job, name="")
        return msgspec.msgpack.encode((job, self.cluster, self.plan))


def load(paths: list[Path]) -> list[dict[str, Any]]:
    """The rows of the files, in order."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [row for path in paths for row in yaml.load(path.read_text(), loader)]


def group_of(row: dict[str, Any]) -> tuple[str, str]:
    """Model and accelerator, however they are spelled: what is left out together."""
    model = re.sub(r"\(.*|[^a-z0-9]", "", str(row["model"]).lower())
    gpu = re.sub(r"[- ].*", "", str(row["hw"].get("gpu") or "mixed").lower())
    return model, gpu


def case_of(row: dict[str, Any]) -> Case:
    """The row as job, cluster and plan; Skip with the reason where it cannot be."""
    hw, par, extra = row["hw"], row["par"], row.get("extra") or {}
    if par.get("fsdp") or par.get("zero") in (2, 3):
        raise Skip("sharded data parallelism (FSDP, ZeRO-2/3)")
    if "lora" in str(extra.get("task", "")) or row.get("family") == "lora":
        raise Skip("LoRA has no weight gradients of the base")
    if SPARSE.match(row["model"]):
        raise Skip("attention over chosen tokens (sparse attention) is not modelled")
    if not row.get("gbs"):
        raise Skip("no global batch size")
    arch = row["arch"]
    changed = re.search(r"(\d+) layers instead of \d+ when overlap is on", str(row.get("notes")))
    if changed and "none" not in str(row.get("overlap") or "none"):
        arch = arch | {"layers": int(changed[1])}
    model = model_of(arch, row["model"])
    tp, pp, cp = (int(par.get(key) or 1) for key in ("tp", "pp", "cp"))
    vpp, ep = int(par.get("vpp") or 1), int(par.get("ep") or 1)
    dp = int(par.get("dp") or int(hw["count"]) // (tp * pp * cp))
    # the fold of expert tensor parallelism: recipes set 1; Megatron's own default is tp
    etp = int(par.get("etp") or 1) if model.moe else tp
    if tp * cp * dp % (etp * ep):
        raise Skip(f"etp {etp} x ep {ep} does not divide tp {tp} x cp {cp} x dp {dp}")
    micro = int(row["mbs"])
    if row["gbs"] % (micro * dp):
        raise Skip(f"global batch {row['gbs']} is no multiple of {micro} x {dp}")
    if vpp > 1 and row["gbs"] // (micro * dp) % pp:
        raise Skip(f"virtual stages need microbatches in multiples of pp {pp}")
    recompute = recompute_of(row.get("recompute"), extra)
    job = JobSpec(
        name=row["id"],
        model=model,
        training=training_of(row, model, tp),
        present=Present(tp=tp, sequence_parallel=bool(par.get("sp", sequence_parallel(row))) and tp > 1),
        entry="pretrain_gpt.py",
    )
    degrees = (np.asarray([value]) for value in (tp, cp, ep, etp, dp, micro))
    pools = pools_of(row, job, Options(*degrees))
    pool = pools[0]
    chunks = chunks_of(row, model, pp, vpp)
    size = tp * cp * dp
    stages = []
    for stage in range(pp):
        mine = tuple(chunks[chunk * pp + stage] for chunk in range(vpp))
        first = stage * size
        nodes = tuple(range(first // pool.devices_per_node, -(-(first + size) // pool.devices_per_node)))
        stages.append(
            Stage(
                pool=pools[stage if len(pools) > 1 else 0].name,
                num_layers=sum(count for _, count in mine),
                nodes=nodes,
                first_rank=first,
                num_devices=size,
                virtual_layers=mine,
                mtp_layers=model.mtp_layers if stage == pp - 1 else 0,
                tp=tp,
                cp=cp,
                ep=ep,
                etp=etp,
                dp=dp,
                recompute=recompute,
            )
        )
    plan = Plan(
        stages=tuple(stages),
        micro_batch_size=micro,
        num_microbatches=row["gbs"] // (micro * dp),
        global_batch_size=row["gbs"],
        vpp=vpp,
    )
    return Case(job, Cluster(pools=tuple({pool.name: pool for pool in pools}.values())), plan)


def pools_of(row: dict[str, Any], job: JobSpec, options: Options) -> list[Pool]:
    """The pool of every stage where they differ, else one for all.

    Where replicas of a stage are of several kinds, the slowest sets the pace of all of them; workstations
    are joined by 1 Gb/s Ethernet (the gradient sums of all rows of that site run at 100 MB/s).
    """
    hetero = row["hw"].get("hetero")
    if not hetero:
        return [pool_of(row)]
    if "stages" not in (row.get("extra") or {}):
        raise Skip("mixed kinds, and not stated which stage has which")

    def layer_s(pool: Pool) -> float:
        table = price(job, pool, options)
        return float(table.forward_CK.sum() + table.backward_CK.sum())

    pools = []
    for stage in row["extra"]["stages"]:
        kinds = dict.fromkeys(replica.split(" ")[0] for replica in stage["replicas"])
        hw = {"count": row["hw"]["count"], "per_node": min(8, row["hw"]["count"] // 2), "inter": "1 gb/s"}
        slowest = max((pool_of(row | {"hw": hw | {"gpu": kind}}) for kind in kinds), key=layer_s)
        pools.append(msgspec.structs.replace(slowest, name=slowest.device.name))
    return pools


def pool_of(row: dict[str, Any]) -> Pool:
    """All devices of the row as one pool, the catalogue's network unless the row states one."""
    hw = row["hw"]
    gpu = str(hw.get("gpu") or "").lower()
    name = next((name for pattern, name in DEVICES if re.search(pattern, gpu)), None)
    if name is None:
        raise Skip(f"device {hw.get('gpu')} is not in the catalogue")
    try:
        device, _ = find_device(name)
    except HapmoeError as error:
        raise Skip(str(error)) from error
    per_node = min(int(hw.get("per_node") or device.devices_per_node), int(hw["count"]))
    share = per_node / device.devices_per_node
    nics, rate = max(1, round(device.nics_per_node * share)), device.nic_bytes_per_s
    kind, source = "", "ASSUMED: the catalogue's usual node"
    inter = str(hw.get("inter") or "").lower()
    for pattern, count, each, named in NETWORKS:
        found = re.search(pattern, inter)
        if found:
            nics, rate, kind, source = count or int(found[1]), each, named, "the row"
            break
    network = Network(
        nics_per_node=nics, nic_bytes_per_s=rate, latency_s=device.nic_latency_s, kind=kind, source=source
    )
    nodes = -(-int(hw["count"]) // per_node)
    return Pool(name="pool", device=device, nodes=nodes, devices_per_node=per_node, network=network)


def model_of(arch: dict[str, Any], name: str) -> ModelSpec:
    """The architecture of a row."""
    layers, hidden, heads = int(arch["layers"]), int(arch["hidden"]), int(arch["heads"])
    act = str(arch.get("act") or "")
    old = re.match(r"(GPT[- ]|OPT|Bloom|gpt)", name) is not None and not name.startswith("GPT OSS")
    gated = bool(arch.get("gated", act not in ("gelu", "squared-relu", "relu") if act else not old))
    moe = None
    if arch.get("experts"):
        every, dense = int(arch.get("moe_every") or 1), int(arch.get("dense_layers") or 0)
        frequency = str(arch.get("moe_layer_freq") or "")
        if re.fullmatch(r"[\[\]()\d,+* ]+", frequency):
            pattern = tuple(bool(value) for value in _pattern(frequency, layers))
        else:
            pattern = tuple(i >= dense and i % every == every - 1 for i in range(layers))
        groups, group_top_k = next((found for known, found in GROUPS.items() if re.search(known, name, re.I)), (0, 0))
        moe = Moe(
            num_experts=int(arch["experts"]),
            top_k=int(arch["topk"]),
            ffn_hidden=int(arch.get("moe_ffn") or arch["ffn"]),
            shared_ffn_hidden=int(arch.get("shared_ffn") or 0),
            pattern=pattern,
            router_groups=groups,
            group_top_k=group_top_k,
        )
    mla = None
    if arch.get("mla"):
        shape = arch["mla"]
        mla = Mla(
            q_lora=shape.get("q_lora"),
            kv_lora=shape["kv_lora"],
            qk_nope=shape["qk_nope"],
            qk_rope=shape["qk_rope"],
            v=shape["v"],
        )
    window = arch.get("sliding_window")
    return ModelSpec(
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=int(arch.get("kv_groups") or heads),
        head_dim=int(arch.get("head_dim") or hidden // heads),
        ffn_hidden=int(arch.get("dense_ffn") or arch["ffn"]),
        gated=gated,
        vocab_size=int(arch["vocab"]),
        tied_embeddings=bool(arch.get("tied_embeddings", old)),
        learned_positions=2048 if old else 0,
        linear_bias=old or re.match("gpt.?oss", name, re.I) is not None,
        layernorm_bias=old,
        qkv_bias=bool(arch.get("qkv_bias")),
        qk_layernorm=bool(arch.get("qk_norm")) or mla is not None,
        attention_window=window,
        window_pattern=tuple(i % 2 == 0 for i in range(layers)) if window else (),
        mla=mla,
        moe=moe,
        mtp_layers=int(arch.get("mtp_layers") or 0),
    )


def _pattern(text: str, layers: int) -> list[int]:
    """Megatron's --moe-layer-freq: an interval, or a list made with + and *."""
    if text.isdigit():
        return [int(i % int(text) == 0) for i in range(layers)]
    values: list[int] = []
    for body, times in re.findall(r"\[([\d, ]+)\] *(?:\* *(\d+))?", text):
        values += [int(value) for value in body.split(",")] * int(times or 1)
    if len(values) != layers:
        raise Skip(f"layer pattern {text} is not of {layers} layers")
    return values


def chunks_of(row: dict[str, Any], model: ModelSpec, pp: int, vpp: int) -> list[tuple[int, int]]:
    """(first layer, count) of every virtual stage, in model order.

    An even split; where layers do not divide, embedding, loss and MTP layers count as layers of
    their stage, as recipes balance them.
    """
    par, extra = row["par"], row.get("extra") or {}
    count, layers = pp * vpp, model.num_layers
    layout = par.get("layout") or extra.get("pp_layout")
    bounds = par.get("partition")
    if stages := extra.get("stages"):
        # embedding and head are counted as a layer each, on the first and the last stage
        counts = [int(stage["layers"]) for stage in stages]
        counts[0] -= 1
        counts[-1] -= 1
    elif layout:
        stages = _unroll(str(layout)).split("|")
        counts = [stage.count("t") for stage in stages]
        if len(counts) != count or sum(counts) != layers:
            raise Skip(f"layout {layout} is not of {count} stages")
    elif bounds and len(bounds) == count + 1:
        # boundaries over the pipeline list with three entries before and three after the layers
        inner = [min(max(bound - 3, 0), layers) for bound in bounds]
        counts = [b - a for a, b in pairwise(inner)]
    elif layers % count == 0:
        counts = [layers // count] * count
    elif RECIPE_LAYOUT.search(f"{row.get('framework')} {row['model']}"):
        # full chunks, the last one takes what is left: it has loss and MTP layers too
        each = -(-layers // count)
        rest = layers - each * (count - 1)
        counts = [each + min(rest, 0), *[each] * (count - 2), max(rest, 0)]
    else:
        weights = [0] * count
        weights[-1] += 1 + model.mtp_layers
        total = layers + weights[-1]
        if total % count:
            weights[0] += 1
            total += 1
        counts = [total // count + (index < total % count) for index in range(count)]
        counts = [max(have - taken, 0) for have, taken in zip(counts, weights, strict=True)]
        index = 1 % count
        while sum(counts) != layers:
            counts[index] += 1 if sum(counts) < layers else -1
            index = (index + 1) % count
    chunks, first = [], 0
    for size in counts:
        chunks.append((first, size))
        first += size
    return chunks


def _unroll(layout: str) -> str:
    text = layout.replace(",", "")
    text = re.sub(r"\(([^)]+)\)\*(\d+)", lambda found: found[1] * int(found[2]), text)
    return re.sub(r"(.)\*(\d+)", lambda found: found[1] * int(found[2]), text)


def stated_step_s(row: dict[str, Any], model_flops: float) -> float | None:
    """Seconds of one step that the row reports: itself, or from tokens/s, or from TFLOP/s."""
    result, count = row["result"], float(row["hw"]["count"])
    for key in ("iter_s", "step_s"):
        if result.get(key):
            return float(result[key])
    if result.get("tokens_s_gpu"):
        return float(row["gbs"]) * float(row["seq"]) / (float(result["tokens_s_gpu"]) * count)
    if result.get("tflops_per_gpu"):
        # arXiv:2104.04473 eq. (3) counts the recomputed forward pass, four passes for three
        counted = 4 / 3 if "2104.04473" in row["source"] and row.get("recompute") == "full" else 1.0
        return counted * model_flops / (float(result["tflops_per_gpu"]) * 1e12 * count)
    return None
