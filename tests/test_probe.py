"""The probe: what it counts in a real run equals independent counts, and afterwards it is gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from bench.lab import MOE, Case, run, write_tree

from hapmoe.errors import InputError
from hapmoe.probe.clock import DeviceClock, choose
from hapmoe.probe.collectives import axis_of
from hapmoe.probe.install import _Probe
from hapmoe.probe.patches import Patches
from hapmoe.probe.steps import Steps
from hapmoe.profiling.carry import alone_files, probe_files
from hapmoe.profiling.probed import load_rank, load_ranks
from hapmoe.volumes import step_traffic

FLAGS: dict[str, str | bool | None] = {"--train-iters": "4"}
SPY = '''
"""Somebody's own sitecustomize: routes the inputs of every router once more, and looks at what is left at the end."""
import atexit, json, os, sys
seen, counts, left = set(), {}, []

def look(module, inputs, output):
    if type(module).__name__ != "TopKRouter":
        return
    import torch
    with torch.no_grad():
        tokens = inputs[0].detach()
        key = (module.layer_number, hash(tokens.numpy().tobytes()))
        if key in seen:
            return  # the same tokens again: recomputation
        seen.add(key)
        scores = tokens.reshape(-1, tokens.shape[-1]) @ module.weight.detach().t()
        chosen = scores.argsort(dim=1, descending=True)[:, : module.topk]
        counts.setdefault(module.layer_number - 1, []).append(
            torch.bincount(chosen.reshape(-1), minlength=scores.shape[1]).tolist())

def tell():
    if counts:
        from megatron.core import parallel_state
        from megatron.core.optimizer import optimizer
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.transformer.moe.router import TopKRouter
        import torch.distributed as dist
        places = [schedules.forward_step, schedules.backward_step, TopKRouter.forward, optimizer.ChainedOptimizer.step,
                  schedules.forward_backward_no_pipelining, dist.all_reduce, dist.batch_isend_irecv,
                  dist.distributed_c10d.isend]
        left = [place.__qualname__ for place in places if "hapmoe_probe" in place.__code__.co_filename]
        with open(os.path.join(os.environ["SPY_OUT"], "spy%s.json" % os.environ["RANK"]), "w") as stream:
            json.dump({"counts": counts, "left": left}, stream)

if os.environ.get("SPY_OUT"):
    class Finder:
        done = False
        def find_spec(self, name, path=None, target=None):
            if name == "megatron.core" and not self.done:
                self.done = True
                sys.modules["torch.nn.modules.module"].register_module_forward_hook(look)
    sys.meta_path.insert(0, Finder())
    atexit.register(tell)
'''


@pytest.mark.parametrize(
    "case",
    [
        # MoE layers recomputed, two optimizers in one
        Case("two ranks", ep=2, dp=2, recompute=(MOE,), flags=FLAGS | {"--use-distributed-optimizer": None}),
        Case("four ranks", (3, 1), tp=2, ep=2, flags=FLAGS),
    ],
    ids=lambda case: case.name,
)
def test_counts_of_a_real_run(tmp_path: Path, case: Case) -> None:
    """Experts apart, four steps, of which two are measured: calls and bytes are the model's, tokens the spy's."""
    write_tree(tmp_path / "site", {"sitecustomize.py": SPY})
    source = str(Path(__file__).parents[1] / "src")
    variables = {"HAPMOE_PROBE_STEPS": "2", "SPY_OUT": str(tmp_path)}
    variables["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "site"), source])
    found = run(case, probe=tmp_path / "out", variables=variables)
    assert sorted(found.losses) == [1, 2, 3, 4]
    ranks = load_ranks(tmp_path / "out")
    assert [one.start.rank for one in ranks] == list(range(case.ranks))
    microbatches = found.plan.num_microbatches
    planned: Counter[str] = Counter()
    for stage, traffic in enumerate(step_traffic(found.job, found.plan)):
        for one in traffic:
            planned[f"{stage} {one.axis} {one.collective} calls"] += one.calls
            planned[f"{stage} {one.axis} {one.collective} bytes"] += one.bytes
    sent: Counter[str] = Counter()
    for rank in ranks:
        stage = rank.start.rank // case.size(0)
        assert rank.start.degrees == {
            "tp": case.tp, "cp": 1, "pp": len(case.layers), "dp": case.dp, "ep": 2, "etp": 1, "edp": 1, "vpp": 1,
            "stage": stage,
        }  # fmt: skip
        assert [step.step for step in rank.steps] == [1, 2]
        spy = json.loads((tmp_path / f"spy{rank.start.rank}.json").read_text())
        assert spy["left"] == []
        for index, step in enumerate(rank.steps):
            mine = slice(microbatches * index, microbatches * (index + 1))
            assert len(step.forward) == len(step.backward) == microbatches and len(step.optimizer) == 1
            assert {str(one.layer): [list(row) for row in one.microbatches] for one in step.tokens} == {
                layer: rows[mine] for layer, rows in spy["counts"].items()
            }
            assert len(step.tokens) == case.layers[stage]
            assert sum(map(sum, step.tokens[0].microbatches)) == microbatches * 64 // case.tp * 2  # experts of each
            parts = [span.cpu_s for spans in (step.forward, step.backward, step.optimizer) for span in spans]
            assert 0 < sum(part or 0.0 for part in parts) <= (step.cpu_s or 0.0)
            assert [one.mark for one in step.memory] == ["begin", "passes", "step"]
        for row in rank.steps[1].collectives:
            sent[f"{stage} {row.axis} {row.collective} calls"] += row.calls / case.size(stage)
            sent[f"{stage} {row.axis} {row.collective} bytes"] += row.calls * row.call_bytes / case.size(stage)
            assert row.timed_calls <= row.calls and (row.wall_s > 0) == (row.timed_calls > 0)
    assert sent == planned
    if case.tp == 1:
        assert {"0 dp reduce_scatter calls", "0 ep all_to_all bytes", "0 dp all_gather bytes"} <= set(sent)
    else:
        assert {"0 pp p2p bytes", "1 pp p2p bytes", "0 tp all_gather bytes", "1 ep all_to_all bytes"} <= set(sent)


def test_python_starts_as_before(tmp_path: Path) -> None:
    """Without a request nothing is loaded; a sitecustomize behind ours runs either way."""
    write_tree(tmp_path / "probe", probe_files())
    write_tree(tmp_path / "site", {"sitecustomize.py": "import sys; sys.own = True\n"})
    code = "import sys; print(sys.own, 'hapmoe_probe.install' in sys.modules, 'torch' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "probe"), str(tmp_path / "site")])}
    for asked, loaded in (("", "False"), (str(tmp_path / "out"), "True")):
        done = subprocess.run(
            [sys.executable, "-c", code], env={**env, "HAPMOE_PROBE": asked}, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == ["True", loaded, "False"]
    assert not (tmp_path / "out").exists()


def test_carried_files_need_nothing_of_hapmoe() -> None:
    files = probe_files()
    assert "sitecustomize.py" in files and "hapmoe_probe/install.py" in files
    assert not [name for name, text in files.items() if "import hapmoe" in text or "from hapmoe" in text]
    alone = alone_files()
    assert {"hapmoe_alone/carried.py", "hapmoe_alone/errors.py"} <= set(alone)
    assert not [name for name, text in alone.items() if "import hapmoe" in text or "from hapmoe." in text]


class Torch:
    """As much of torch as ``Steps`` asks for."""

    _C = types.SimpleNamespace(_current_graph_task_id=lambda: -1)
    cuda = types.SimpleNamespace(is_available=lambda: False)


def steps_into(rows: list[dict[str, Any]]) -> Steps:
    return Steps(Torch(), rows.append)


def test_optimizers_of_an_optimizer_count_once_and_evaluation_never() -> None:
    rows: list[dict[str, Any]] = []
    steps = steps_into(rows)
    single = steps.optimizer(lambda: 1)
    chained = steps.optimizer(lambda: single() + single())
    forward = steps.timed("forward")(lambda: None)
    passes = steps.passes(lambda *, forward_only: forward())
    passes(forward_only=True)
    passes(forward_only=False)
    assert chained() == 2 and len(rows) == 1
    assert len(rows[0]["optimizer"]) == len(rows[0]["forward"]) == 1 and rows[0]["since_last_s"] is None
    chained()  # outside of a step
    assert len(rows) == 1


def test_a_step_without_megatrons_optimizer_ends_where_the_next_begins() -> None:
    rows: list[dict[str, Any]] = []
    passes = steps_into(rows).passes(lambda **_: None)
    for _ in range(3):
        passes(forward_only=False)
    assert [row["step"] for row in rows] == [1, 2] and rows[0]["optimizer"] == []


def test_a_step_that_fails_is_none() -> None:
    rows: list[dict[str, Any]] = []
    steps = steps_into(rows)

    def fail(**_: object) -> None:
        raise ValueError("out of memory")

    with pytest.raises(ValueError, match="out of memory"):
        steps.passes(fail)(forward_only=False)
    steps.optimizer(lambda: None)()
    assert rows == []


def test_groups_by_the_names_of_any_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Core 0.20 reduces the norm of experts' gradients in a group of its own name."""
    from megatron.core import parallel_state

    for attribute, axis in (
        ("_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP", "etp_ep_pp"),
        ("_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", "edp"),
        ("_EXPERT_DATA_PARALLEL_GROUP", "edp"),
        ("_SOMETHING_NEW", "other"),
    ):
        group = types.SimpleNamespace()
        monkeypatch.setattr(parallel_state, attribute, group, raising=False)
        assert axis_of(group) == axis


ALONE = """
import types
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from hapmoe.probe.patches import Patches
from hapmoe.probe.received import install, training
def got(dtype=torch.float32):
    tensors = [torch.full((1000,), float("nan") if dtype.is_floating_point else 7, dtype=dtype) for _ in range(3)]
    tensors[0].requires_grad_(dtype.is_floating_point)  # as Megatron's buffers
    dist.irecv(tensors[0], 1).wait()
    dist.recv(tensor=tensors[1], src=1)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensors[2], 1)]):
        work.wait()
    return tensors
patches = Patches()
install(patches)
dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
for dtype in (torch.float32, torch.bfloat16):
    assert all(0.015 < one.float().std() < 0.025 for one in got(dtype))
assert all((one == 7).all() for one in got(torch.int64))
asked = types.SimpleNamespace()
module = types.SimpleNamespace(get_args=lambda: asked)
module.build_train_valid_test_data_loaders = lambda provider: asked.do_train
training(patches)(module)
assert module.build_train_valid_test_data_loaders(None) is True
patches.remove()
assert all(one.isnan().all() for one in got())
"""


def test_what_a_rank_by_itself_receives_is_finite() -> None:
    """Torch's fake back end leaves a receiver's buffer as it was: here not-a-numbers."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", ALONE], check=True, timeout=120)


def test_patches_leave_what_others_have_wrapped() -> None:
    module = types.SimpleNamespace(act=lambda: 1, other=lambda: 2)
    before = module.act
    patches = Patches()
    assert patches.wrap(module, "act", lambda act: lambda: act() + 10)
    assert patches.wrap(module, "other", lambda act: lambda: act() + 10)
    assert not patches.wrap(module, "missing", lambda act: act)
    assert module.act() == 11
    theirs = module.other = lambda: 3
    patches.remove()
    assert module.act is before and module.other is theirs


class Event:
    """A moment of a made-up stream: each is 5 ms after the one before."""

    now = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        self.at = -1.0

    def record(self) -> None:
        Event.now += 5.0
        self.at = Event.now

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


def test_events_on_a_device_and_none_while_a_graph_is_captured() -> None:
    capturing = [False]
    device = types.SimpleNamespace(
        Event=Event,
        is_available=lambda: True,
        current_device=lambda: 0,
        get_device_name=lambda _: "NVIDIA H200",
        is_current_stream_capturing=lambda: capturing[0],
        synchronize=lambda: None,
        memory_allocated=lambda: 1,
        max_memory_allocated=lambda: 2,
        memory_reserved=lambda: 3,
        mem_get_info=lambda: (60, 80),
    )
    clock = choose(types.SimpleNamespace(npu=device, cuda=None))
    assert isinstance(clock, DeviceClock) and clock.device == "NVIDIA H200"
    assert clock.seconds(clock.mark(), clock.mark()) == {"wall_s": 0.005}
    capturing[0] = True
    assert clock.mark() is None and clock.seconds(None, None) == {}
    assert clock.memory() == {"allocated_bytes": 1, "peak_bytes": 2, "reserved_bytes": 3, "device_bytes": 20}
    del device.mem_get_info
    assert "device_bytes" not in clock.memory()


def test_a_full_disk_ends_the_measurement_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank0.jsonl.part").symlink_to("/dev/full")
    monkeypatch.setenv("HAPMOE_PROBE", str(tmp_path))
    monkeypatch.setattr("hapmoe.probe.install._rank", lambda: 0)
    probe = _Probe()
    monkeypatch.setattr(probe, "_start", lambda: {"event": "start"})
    probe.write({"event": "step", "step": 1})
    assert not probe.steps.active
    assert "rank 0: [Errno 28] No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_incomplete_and_missing_ranks_are_named(tmp_path: Path) -> None:
    start = {"event": "start", "schema": 1, "rank": 1, "world_size": 2, "host": "a", "device": "b", "clock": "host"}
    start |= {"date": "2026-11-30T10:00:00Z", "versions": {}, "degrees": {}}
    step = {"event": "step", "step": 1, "since_last_s": None, "forward": [], "backward": [], "optimizer": []}
    step |= {"tokens": [], "collectives": [], "memory": []}
    path = tmp_path / "rank1.jsonl"
    path.write_text("\n".join(map(json.dumps, (start, step))))
    with pytest.raises(InputError, match=r"rank1\.jsonl: incomplete"):
        load_rank(path)
    path.write_text("\n".join(map(json.dumps, (start, step, {"event": "end", "steps": 1}))))
    assert load_rank(path).steps[0].step == 1
    with pytest.raises(InputError, match="rank 0 of 2 has not measured"):
        load_ranks(tmp_path)
    path.write_text('{"event": "sta')
    with pytest.raises(InputError, match="not what the probe writes"):
        load_rank(path)
