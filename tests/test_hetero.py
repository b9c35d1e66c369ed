"""Stages of unequal degrees train as one rank does: real Megatron-Core, gloo, the emitted launcher.

A few configurations and six random ones; ``python -m bench.hetero`` has more than forty, and ``--fuzz 100``.
"""

from __future__ import annotations

import pytest
from bench import hetero_cases as hetero
from bench.hetero import compare, reference, resume, train
from bench.hetero_cases import Unequal

from hapmoe.plan import Recompute

_MOE_ALL = {**hetero.SEQUENCE_LOSS, **hetero.Z_LOSS}

CASES = (
    # three stages, sp against dp against one, ep/etp unequal, uneven layers, overlapped distributed optimizer
    hetero.unequal("tp2 ep2 etp1 / dp2 ep2 / dp1", (1, 2, 1), _MOE_ALL, hetero.OVERLAP),
    # dp 3 against 2: parts of the batch that no stage cuts alike
    hetero.unequal("dp3 / dp2", (2, 2), {"--global-batch-size": "24"}, samples=6),
    # interleaved, recomputation per stage
    hetero.unequal("tp2 / dp2 ep2", (2, 2), _MOE_ALL, vpp=2, recompute=(hetero.block(1), Recompute())),
    # tensor parallelism without sequence parallelism against context parallelism
    hetero.unequal("tp2 / cp2", (3, 1), hetero.DENSE, hetero.CONTEXT, hetero.DISTRIBUTED),
    hetero.unequal("dp1 / dp2 ep2", (2, 2), hetero.TOKENS, variables=hetero.HOST),
    # devices of two vendors, whose libraries refuse each other's ranks
    hetero.unequal(
        "dp2 / tp2 ep2 etp1 / dp1",
        (1, 2, 1),
        {**hetero.OVERLAP, **hetero.SEQUENCE_LOSS},
        libraries=("nccl", "nccl", "hccl"),
    ),
    # a stage without layers, of which Megatron's log of auxiliary losses knows nothing
    hetero.unequal("tp2 / dp1", (0, 4), hetero.SEQUENCE_LOSS),
)


@pytest.mark.parametrize("one", [*CASES, *hetero.fuzz(6, seed=1)], ids=lambda one: one.case.name)
def test_as_one_rank(one: Unequal) -> None:
    outcome = compare(train(one.case, **one.variables), reference(one))
    assert outcome.good, outcome


def test_a_wrong_scale_is_seen() -> None:
    """The same comparison fails without the scaling of gradients at boundaries."""
    control = hetero.unequal("dp2 ep2 / dp1", (2, 2), _MOE_ALL, variables=hetero.CONTROL.variables)
    outcome = compare(train(control.case, **control.variables), reference(control))
    assert not outcome.good and outcome.norm_error > 0.01


def test_a_wrong_scale_is_refused_before_the_first_step() -> None:
    one = hetero.unequal("dp2 ep2 / dp1", (2, 2), _MOE_ALL)
    with pytest.raises(RuntimeError, match="a gradient from stage 1 arrived wrong in the trial"):
        train(one.case, HAPMOE_LAB_UNSCALED="1")


def test_resumes_under_other_plans_and_under_a_uniform_one() -> None:
    """Each as upstream's own save and resume; one of them has no rank with ep > 1, and so no optimizer for experts."""
    before, after = hetero.RESUMES[0]
    chosen = [one for one in after if one.name != before.name and one.ranks < 6]
    assert [max(one.mesh(stage)["ep"] for stage in range(len(one.layers))) for one in chosen] == [2, 1, 2]
    for outcome in resume(before, chosen):
        assert outcome.good, outcome


def test_an_optimizer_without_experts_is_resumed_with_them() -> None:
    before, after = hetero.RESUMES[2]
    (outcome,) = resume(before, after[:1])
    assert outcome.good, outcome
