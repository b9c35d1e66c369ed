"""What crosses between unequal stages: against ranks that are written out one by one."""

from __future__ import annotations

import builders as b
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hapmoe.boundary import boundary_s, crossing
from hapmoe.options import Options
from hapmoe.plan import Plan
from hapmoe.resolve import resolve
from hapmoe.volumes import step_traffic

Mesh = tuple[int, int, int]


def options(mesh: Mesh, samples: int) -> Options:
    tp, cp, dp = mesh
    return Options(*(np.asarray([value]) for value in (tp, cp, 1, 1, dp, samples // dp)))


def held(mesh: Mesh, samples: int, seq: int, shared: bool) -> list[set[tuple[int, int]]]:
    """(sample, position) of every rank, tp fastest, then cp, then dp (Megatron's rank order)."""
    tp, cp, dp = mesh
    ranks = []
    for d in range(dp):
        for c in range(cp):
            chunks = np.split(np.arange(seq), 2 * cp)
            positions = np.concatenate([chunks[c], chunks[2 * cp - 1 - c]])
            for t in range(tp):
                mine = np.split(positions, tp)[t] if shared else positions
                batch = range(d * samples // dp, (d + 1) * samples // dp)
                ranks.append({(s, int(p)) for s in batch for p in mine})
    return ranks


MESH = st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 3, 4]))


@settings(max_examples=150, deadline=None)
@given(first=MESH, second=MESH, dense=st.booleans())
def test_messages_and_bytes_are_those_of_ranks_written_out(first: Mesh, second: Mesh, dense: bool) -> None:
    """A rank sends each peer what both hold; copies over tp go to one receiver each (tp modulo the sender's)."""
    job = b.with_training(b.job(moe=None if dense else 8, tp=2), seq_len=48, global_batch_size=12)
    shared = not dense  # a dense script that says tp 2 without sequence parallelism keeps its way
    senders, receivers = held(first, 12, 48, shared), held(second, 12, 48, shared)
    sent, got = [0] * len(senders), [0] * len(receivers)
    out, into = [0] * len(senders), [0] * len(receivers)
    for r, mine in enumerate(senders):
        for q, theirs in enumerate(receivers):
            copy_of_another = not shared and q % second[0] % first[0] != r % first[0]
            both = len(mine & theirs)
            if both and not copy_of_another:
                sent[r] += 1
                got[q] += 1
                out[r] += both
                into[q] += both
    across = crossing(job, options(first, 12), options(second, 12))
    width = job.model.hidden * 2  # bf16
    assert across.sends_K[0] == max(sent) and across.receives_K[0] == max(got)
    assert across.received_bytes_K[0] == max(into) * width
    assert across.sent_bytes_K[0] == pytest.approx(max(out) * width)


def test_a_boundary_between_equal_meshes_is_one_message() -> None:
    """4 sequences of 4096 tokens, 256 wide, bf16, over 4 ranks: 4 * 4096 * 256 * 2 / 4 bytes each."""
    across = crossing(b.job(), options((2, 1, 2), 4), options((2, 1, 2), 4))
    assert across.sends_K[0] == across.receives_K[0] == 1
    assert across.sent_bytes_K[0] == across.received_bytes_K[0] == 4 * 4096 * 256 * 2 / 4


def test_the_side_that_moves_most_sets_the_time() -> None:
    """One rank against eight over a link of 1 GB/s per node: the one node moves all bytes either way."""
    cluster = b.cluster(b.pool("a100"), b.pool("h800", devices_per_node=1), links=(("a100", "h800"),), transport="nccl")
    near, far = cluster.pools
    one, eight = options((1, 1, 1), 8), options((1, 1, 8), 8)
    whole = 8 * 4096 * 256 * 2 / (1e9 * 0.85)  # fabrics.yaml, network.send_recv.e_max
    there = float(boundary_s(b.job(), cluster, near, far, eight, False, one)[0])
    back = float(boundary_s(b.job(), cluster, far, near, one, False, eight)[0])
    assert there == back
    # seven further messages to start at 15 us each, 20 us of latency, and copies at 2 TB/s
    copies = 2 * 8 * 4096 * 256 * 2 * (1 + 1 / 8) / 2e12
    assert there == pytest.approx(whole + 2e-5 + 7 * 1.5e-5 + copies)


def test_traffic_counts_every_part() -> None:
    """dp 1 -> dp 4: the first stage sends four messages a microbatch, each stage-1 rank one gradient back."""
    two = b.cluster(b.pool("a100"), b.pool("h800"))
    stages = ({"dp": 1, "micro_batch_size": 4}, {"dp": 4, "micro_batch_size": 1})
    plan: Plan = resolve(b.job(), two, b.plan((4, 4), pools=("a100", "h800"), stages=stages, micro_batch_size=4))
    first, second = ({t.name: t for t in stage if t.axis == "pp"} for stage in step_traffic(b.job(), plan))
    assert plan.num_microbatches == 16
    assert (first["activations"].calls, second["gradients"].calls) == (16 * 4, 16)
    assert first["activations"].bytes == 4 * second["gradients"].bytes == 16 * 4 * 4096 * 256 * 2
