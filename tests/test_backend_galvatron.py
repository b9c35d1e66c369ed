"""The strategy file as Galvatron reads it (its reader, rewritten here), and what it cannot carry."""

from __future__ import annotations

import json
from itertools import product

import builders as b
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hapmoe.errors import InputError, Unsupported
from hapmoe.launch import target
from hapmoe.launch.verdict import verdict
from hapmoe.plan import Plan, Recompute
from hapmoe.resolve import resolve
from hapmoe.rules import check

POOLS = b.cluster(b.pool("a100"), b.pool("h800"))
JOB = b.with_training(b.job(), global_batch_size=64)
FULL = Recompute(granularity="full", method="block", num_layers=2)


def read(text: str, world: int) -> list[dict[str, int]]:
    """Per layer what ``get_hybrid_parallel_configs_api``, ``config2strategy``, ``check_hp_config`` and
    ``hp_config_whole_model`` of Galvatron cea12ff make of a file, with their assertions."""
    config = json.loads(text)

    def numbers(key: str, default: str = "") -> list[int]:
        return [int(part) for part in config.get(key, default).split(",")]

    tp, division = numbers("tp_sizes_enc"), numbers("pp_division")
    ones = ",".join("1" for _ in tp)
    rows = {
        "tp": tp,
        "consecutive": numbers("tp_consecutive_flags"),
        "dp_type": numbers("dp_types_enc"),
        "cp": numbers("cp_sizes_enc", ones),
        "sp": numbers("use_sp"),
        "checkpoint": numbers("checkpoint"),
        "ep": numbers("ep_sizes_enc", ones),
        "etp": numbers("tp_of_ep_sizes_enc", ones),
        "pp_rank": [stage for stage, count in enumerate(division) for _ in range(count)],
    }
    pp = config["pp_deg"]
    assert len(division) == pp and world % pp == 0 and {len(row) for row in rows.values()} == {len(tp)}
    smallest = min(*tp, config["vtp"]) * min(*rows["cp"], config["vcp"])
    assert config["global_bsz"] % (world // pp // smallest) == 0
    assert config["pipeline_type"] in ("gpipe", "pipedream_flush") and config["default_dp_type"] in (
        "ddp",
        "zero2",
        "zero3",
    )
    layers = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
    for layer in layers:
        assert world // pp % layer["tp"] == 0 and layer["consecutive"] == 1 and layer["dp_type"] == layer["sp"] == 0
        layer["dp"] = world // pp // layer["tp"] // layer["cp"]
        layer["edp"] = world // pp // layer["ep"] // layer["etp"]
        assert config["global_bsz"] % (config["chunks"] * layer["dp"]) == 0
        layer["mbs"] = config["global_bsz"] // config["chunks"] // layer["dp"]
    return layers


def made(plan: Plan) -> list[dict[str, int]]:
    plan = resolve(JOB, POOLS, plan)
    files = target("galvatron", plan.backend)(JOB, POOLS, plan, "{}")
    return read(files["galvatron/strategy.json"], plan.num_devices)


STAGE = st.sampled_from(
    [
        {"tp": tp, "cp": 1, "dp": 8 // tp, "ep": ep, "etp": etp}
        for tp, ep, etp in product((1, 1, 2), (2, 4, 8), (1, 2))
        if ep * etp <= 8
    ]
    + [{"tp": 2, "cp": 2, "dp": 2, "ep": 4, "etp": 1}]
)


@settings(max_examples=150, deadline=None)
@given(first=STAGE, last=STAGE, split=st.integers(1, 7), again=st.sampled_from([Recompute(), FULL]))
def test_every_layer_is_given_its_stages_degrees(
    first: dict[str, int], last: dict[str, int], split: int, again: Recompute
) -> None:
    most = max(first["dp"], last["dp"])
    stages = tuple({**stage, "micro_batch_size": most // stage["dp"]} for stage in (first, last))
    plan = b.plan((split, 8 - split), pools=("a100", "h800"), stages=stages, recompute=(again, Recompute()))
    plan = msgspec.structs.replace(plan, backend="galvatron", micro_batch_size=stages[0]["micro_batch_size"])
    plan = msgspec.structs.replace(resolve(JOB, POOLS, plan), num_microbatches=64 // most)
    possible, _ = verdict(JOB, POOLS, plan)
    assert possible == (not check(JOB, POOLS, plan))
    if not possible:
        with pytest.raises(Unsupported, match="not a plan for Galvatron: rule "):
            made(plan)
        return
    layers = made(plan)
    assert len(layers) == 8
    for index, layer in enumerate(layers):
        stage = plan.stages[index >= split]
        assert layer["pp_rank"] == int(index >= split)
        for name in ("tp", "cp", "ep", "etp", "dp", "edp"):
            assert layer[name] == getattr(stage, name), name
        assert layer["mbs"] == stage.micro_batch_size
        assert layer["checkpoint"] == int(index < min(split, again.num_layers))


def test_what_it_cannot_carry_is_refused() -> None:
    vpp = msgspec.structs.replace(b.plan((4, 4), pools=("a100", "h800"), dp=8, ep=4, vpp=2), backend="galvatron")
    with pytest.raises(Unsupported, match="does not interleave"):
        made(vpp)
    amd = b.cluster(b.pool("mi300x"))
    plan = msgspec.structs.replace(b.plan(pools=("mi300x",), dp=8, ep=4), backend="galvatron")
    with pytest.raises(Unsupported, match="Galvatron runs on NCCL alone, and the plan uses rccl"):
        target("galvatron")(JOB, amd, plan, "{}")
    for model in ({"mtp_layers": 1}, {"mla": b.mla()}, {"attention_window": 128}):
        job = b.with_model(JOB, **model)
        broken = check(job, POOLS, msgspec.structs.replace(b.plan(dp=8, ep=4), backend="galvatron"))
        assert [violation.rule for violation in broken] == ["galvatron-model"]


@pytest.mark.parametrize(
    ("backend", "name"), [("galvatron", "torchrun"), ("galvatron", "slurm"), ("megatron", "galvatron")]
)
def test_back_end_and_target_belong_together(backend: str, name: str) -> None:
    with pytest.raises(InputError, match=f"target {name} does not write plans of back end {backend}"):
        target(name, backend)
    assert target("torchrun", "megatron") and target("galvatron", "galvatron") and target("torchrun", "any")


def test_no_launcher_is_made_for_it() -> None:
    plan = msgspec.structs.replace(b.plan(dp=8, ep=4), backend="galvatron")
    with pytest.raises(Unsupported, match="use target galvatron"):
        target("torchrun")(JOB, POOLS, plan, "{}")
