"""The runtime's parts that need no training run: who sends what, what is refused, and that Megatron is as it was
read."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from types import ModuleType, SimpleNamespace
from typing import Any

import builders as b
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hapmoe.boundary import crossing
from hapmoe.options import Options
from hapmoe.runtime import Refused, groups
from hapmoe.runtime.mesh import Layout, Mesh, read_layout
from hapmoe.runtime.patches import Patch, missing, version_of
from hapmoe.runtime.refusals import Facts, argument_refusals, refusals, warnings
from hapmoe.runtime.routes import receives, sends
from hapmoe.runtime.table import Attached, table

SEQUENCE, BATCH = 72, 12
DEGREES = st.builds(
    Mesh,
    index=st.just(0),
    first=st.just(0),
    tp=st.sampled_from((1, 2, 3, 4)),
    cp=st.sampled_from((1, 2, 3)),
    dp=st.sampled_from((1, 2, 3, 4)),
)


def held(mesh: Mesh, rank: int, split: bool) -> np.ndarray:
    """What Megatron gives a rank of a whole [sequence, batch] tensor of numbers: slices by dp, cp, tp.

    Context parallelism as get_batch_on_this_cp_rank does it (core/utils.py): the sequence viewed as
    2*cp chunks, of which index_select takes [c, 2*cp-1-c].
    """
    whole = np.arange(SEQUENCE * BATCH).reshape(SEQUENCE, BATCH)
    tp, cp, dp = rank % mesh.tp, rank // mesh.tp % mesh.cp, rank // mesh.tp // mesh.cp
    part = np.split(whole, mesh.dp, axis=1)[dp]
    if mesh.cp > 1:
        chunks = part.reshape(2 * mesh.cp, -1, part.shape[1])
        part = chunks[[cp, 2 * mesh.cp - 1 - cp]].reshape(-1, part.shape[1])
    return np.split(part, mesh.tp)[tp] if split else part


@settings(max_examples=120, deadline=None)
@given(DEGREES, DEGREES, st.booleans(), st.booleans())
def test_messages_carry_everything_once(sender: Mesh, receiver: Mesh, from_split: bool, to_split: bool) -> None:
    """What is sent, put where the receiver wants it, is what Megatron would have given the receiver."""
    receiver = Mesh(1, sender.size, tp=receiver.tp, cp=receiver.cp, dp=receiver.dp)
    split = (from_split, to_split)
    wire: dict[tuple[int, int], np.ndarray] = {}
    for rank in range(sender.size):
        mine = held(sender, rank, from_split)
        for route in sends(sender, receiver, rank, SEQUENCE, BATCH, split):
            assert (rank, route.peer) not in wire
            wire[rank, route.peer] = mine[list(route.rows), slice(*route.batch)]
    for rank in range(receiver.size):
        expected = held(receiver, rank, to_split)
        found, times = np.full_like(expected, -1), Counter[tuple[int, int]]()
        for route in receives(sender, receiver, rank, SEQUENCE, BATCH, split):
            place = np.ix_(route.rows, range(*route.batch))
            found[place] = wire.pop((route.peer, receiver.first + rank))
            times.update((row, column) for row in route.rows for column in range(*route.batch))
        assert (found == expected).all()
        assert set(times.values()) == {1}
    assert not wire


@settings(max_examples=100, deadline=None)
@given(DEGREES, DEGREES, st.booleans())
def test_predicted_messages_are_those_sent(sender: Mesh, receiver: Mesh, split: bool) -> None:
    """The cost model's messages and bytes of the busiest rank, and the runtime's."""
    job = b.with_training(b.job(moe=8 if split else None, tp=2), seq_len=SEQUENCE, global_batch_size=BATCH)
    found = [
        sends(sender, receiver, rank, SEQUENCE, BATCH, (split and sender.tp > 1, split and receiver.tp > 1))
        for rank in range(sender.size)
    ]
    sizes = [sum(len(route.rows) * (route.batch[1] - route.batch[0]) for route in routes) for routes in found]
    predicted = crossing(job, options(sender), options(receiver))
    assert predicted.sends_K[0] == max(map(len, found))
    assert predicted.sent_bytes_K[0] == pytest.approx(max(sizes) * job.model.hidden * 2)  # bf16


def options(mesh: Mesh) -> Options:
    return Options(*(np.asarray([value]) for value in (mesh.tp, mesh.cp, 1, 1, mesh.dp, BATCH // mesh.dp)))


def test_what_does_not_divide_is_refused() -> None:
    three, two = Mesh(0, 0, dp=3), Mesh(1, 3, dp=2)
    with pytest.raises(Refused, match="stage 0 cannot divide 4 sequences"):
        sends(three, two, 0, SEQUENCE, 4, (False, False))


def plan(*stages: dict[str, int]) -> dict[str, Any]:
    return {"stages": list(stages), "micro_batch_size": 4}


def test_layout_of_a_plan() -> None:
    layout = read_layout(plan({"tp": 2, "etp": 2}, {"dp": 4, "ep": 2, "micro_batch_size": 1}), 3)
    assert layout.world_size == 6
    assert (layout.mine.index, layout.local, layout.mine.place(layout.local)) == (1, 1, (0, 0, 1))
    # --micro-batch-size and dp of stage 1 in a job of 8 ranks: 8 / (tp * cp * pp) = 4
    assert layout.equal_world_size == 8
    with pytest.raises(Refused, match="samples per microbatch"):
        read_layout(plan({}, {"dp": 4, "micro_batch_size": 2}), 0)
    with pytest.raises(Refused, match="multiple of ep"):
        read_layout(plan({"dp": 3, "ep": 2, "micro_batch_size": 1}), 0)
    with pytest.raises(Refused, match="outside"):
        read_layout(plan({}, {}), 2)


def test_who_carries_which_boundary() -> None:
    """Between two libraries the link's transport, with all ranks; else their own, with the ranks of its stages."""
    three = plan({}, {"dp": 2, "micro_batch_size": 2}, {})
    layout = read_layout(three, 0, ("", "gloo", "gloo"), ("nccl", "nccl", "hccl"))
    assert [layout.carrier(index) for index in range(3)] == ["nccl", "gloo", "gloo"]
    assert (layout.carried("nccl"), layout.carried("gloo")) == ([0, 1, 2], [0, 1, 2, 3])
    joined = read_layout(three, 0, ("", "flagcx", "flagcx"), ("rccl", "rccl", "nccl"))
    assert joined.carried("flagcx") == [0, 1, 2, 3]
    assert not read_layout(three, 0, (), ("nccl", "nccl", "nccl")).mixed
    unlinked = read_layout(three, 0, ("", "gloo", ""), ("nccl", "nccl", "hccl"))
    assert unlinked.carrier(2) == "gloo"
    with pytest.raises(Refused, match="nothing carries the boundary between nccl of stage 1 and hccl"):
        read_layout(three, 0, ("", "", "gloo"), ("nccl", "nccl", "hccl"))


LAYOUT = read_layout(plan({"tp": 2, "etp": 2}, {"dp": 2, "ep": 2, "micro_batch_size": 2}), 0)


def facts(**changes: Any) -> Facts:
    settings = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0, "num_moe_experts": 4}
    settings |= {name: value for name, value in changes.items() if name not in ("tied", "distributed")}
    names = Facts.of.__func__.__globals__["_LOOKED_AT"]  # type: ignore[attr-defined]
    config = {name: settings.get(name) for name in names}
    return Facts({}, False, changes.get("tied", False), changes.get("distributed", True), config)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tied": True}, "tied embeddings"),
        ({"distributed": False}, "FSDP"),
        ({"mtp_num_layers": 1}, "MTP"),
        ({"variable_seq_lengths": True}, "variable-seq-lengths"),
        ({"overlap_moe_expert_parallel_comm": True}, "overlap-moe-expert"),
        ({"num_moe_experts": 3}, "3 experts do not divide by ep 2"),
        (
            {"moe_router_load_balancing_type": ["seq_aux_loss"], "moe_aux_loss_coeff": [0.1]}
            | {"calculate_per_token_loss": True},
            "seq_aux_loss with per-token loss",
        ),
        ({"cuda_graph_scope": ["full_iteration"]}, "CUDA graphs"),
    ],
)
def test_refusals(changes: dict[str, Any], reason: str) -> None:
    assert not list(refusals(LAYOUT, [facts(), facts()]))
    assert any(reason in one for one in refusals(LAYOUT, [facts(), facts(**changes)]))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"dataloader_type": "cyclic"}, "first stage \\(dp 1\\) would read other tokens than the last one \\(dp 2\\)"),
        ({"rampup_batch_size": ["1", "1", "8"]}, "rampup"),
        ({"ckpt_format": "torch", "save": "somewhere"}, "ckpt-format torch"),
        ({"use_torch_fsdp2": True}, "fsdp2"),
        ({"eval_micro_batch_size": 2, "micro_batch_size": 4}, "eval-micro-batch-size"),
        ({"perform_rl_step": True}, "one data-parallel size"),
        ({"optimizer": "dist_muon"}, "--optimizer dist_muon"),
    ],
)
def test_refused_arguments(given: dict[str, Any], reason: str) -> None:
    assert not list(argument_refusals(LAYOUT, SimpleNamespace(dataloader_type="single", save="somewhere")))
    assert re.search(reason, " ".join(argument_refusals(LAYOUT, SimpleNamespace(**given))))


def test_expert_tensor_parallelism_alone() -> None:
    alone = read_layout(plan({"tp": 2, "etp": 1}, {}), 0)
    assert "ep 1 with etp 1, tp 2" in next(iter(refusals(alone, [facts(), facts()])))


def test_strength_of_aux_loss_is_said() -> None:
    on = facts(moe_aux_loss_coeff=0.01)
    assert "strength differs" in next(iter(warnings(LAYOUT, [on, on])))
    assert not list(warnings(LAYOUT, [facts(), facts()]))
    same = Layout((Mesh(0, 0), Mesh(1, 1)), 0, ("", ""))
    assert not list(warnings(same, [on, on]))


def patches() -> tuple[Patch, ...]:
    return table(Attached(LAYOUT))


def test_megatron_has_what_is_replaced() -> None:
    """Every name and argument in the installed megatron-core; a newer one without them fails here by name."""
    core = importlib.import_module("megatron.core")
    seen = 0
    for patch in patches():
        if patch.module.startswith("megatron.core") and patch.concerns(version_of(core)):
            assert missing(patch, importlib.import_module(patch.module)) == ""
            seen += 1
    assert seen == 9


def test_every_group_across_stages_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Core 0.19 got one more; summed over one stage only, each stage clipped by a norm of its own."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    mesh, original = Mesh(0, 0, tp=2, dp=2, ep=2, etp=2), parallel_state.initialize_model_parallel
    before = dict(vars(parallel_state))
    elsewhere = {groups._EXPERTS_WITH_REMAT, "_POSITION_EMBEDDING_GROUP"}  # newer; of the first stage alone
    assert groups._spanning(original, mesh, {}) == groups._ACROSS - elsewhere
    assert all(vars(parallel_state)[name] is value for name, value in before.items() if value is None)

    def newer(**given: Any) -> None:
        original(**given)
        pairs = [dist.new_group([rank, rank + 4]) for rank in range(4)]
        parallel_state._DATA_MODULO_EXPERT_PARALLEL_GROUP = pairs[0]

    monkeypatch.setattr(parallel_state, "_DATA_MODULO_EXPERT_PARALLEL_GROUP", None, raising=False)
    assert "_DATA_MODULO_EXPERT_PARALLEL_GROUP" in groups._spanning(newer, mesh, {})


def test_a_changed_megatron_is_refused_by_name() -> None:
    patch = next(one for one in patches() if one.name == "P2PCommunicator._communicate")
    module = ModuleType(patch.module)
    assert "has no P2PCommunicator._communicate" in missing(patch, module)

    class P2PCommunicator:
        def _communicate(self, *, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool) -> None: ...

    module.P2PCommunicator = P2PCommunicator  # type: ignore[attr-defined]
    assert "no longer takes recv_next, tensor_shape, wait_on_reqs" in missing(patch, module)
