"""check, render, replan and --backend any, as commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import ENV, EXAMPLES
from two_hosts import HOSTS, TwoHosts

from hapmoe.backends import BACKENDS, capabilities
from hapmoe.planning import plan_job
from hapmoe.rules import check

SCRIPT = str(EXAMPLES / "mixtral-s.sh")
CLUSTER = """pools:
  - {name: old, device: a100-80g-sxm, nodes: 1, devices_per_node: 8}
  - {name: new, device: h100-80g-sxm, nodes: 1, devices_per_node: 8}
"""
PLAN = {
    "micro_batch_size": 1,
    "stages": [
        {"pool": "old", "num_layers": 8, "dp": 8, "ep": 8},
        {"pool": "new", "num_layers": 16, "dp": 8, "ep": 8},
    ],
}


def hapmoe(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hapmoe", *words]
    return subprocess.run(command, cwd=folder, env=ENV, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    return tmp_path


COMMON = ("plan.json", "--script", SCRIPT, "--cluster", "cluster.yaml")


def test_check_says_yes_on_one_page(folder: Path) -> None:
    done = hapmoe(folder, "check", *COMMON)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "Legal and launchable by megatron." and len(lines) < 50
    assert [line.split()[:3] for line in lines[3:5]] == [["0", "0-7", "0"], ["1", "8-15", "0"]]
    assert "d98e8a64" in done.stdout and "expert-mesh (PS:882)" in done.stdout


def test_check_says_what_is_broken(folder: Path) -> None:
    broken = json.loads((folder / "plan.json").read_text())
    broken["stages"][0]["num_layers"] = 7
    broken["stages"][1]["recompute"] = {"granularity": "full"}
    (folder / "plan.json").write_text(json.dumps(broken))
    done = hapmoe(folder, "check", *COMMON)
    assert done.returncode == 1
    assert done.stdout.startswith("NOT LEGAL: 3 rules broken.\n  layers: the stages hold 7+16 = 23 layers")
    assert "source: PL:107" in done.stdout
    document = json.loads(hapmoe(folder, "check", *COMMON, "--json").stdout)
    assert not document["legal"] and {v["rule"] for v in document["violations"]} == {"layers", "recompute"}
    assert {
        "rule": "layers",
        "holds": False,
        "why": document["rules"][0]["why"],
        "source": "PL:107",
    }.keys() == document["rules"][0].keys()
    assert len(document["rules"]) > 60 and all(rule["source"] for rule in document["rules"])


def test_check_for_another_back_end_and_other_inputs(folder: Path) -> None:
    stale = json.loads((folder / "plan.json").read_text()) | {"inputs": {"job_sha256": "0", "cluster_sha256": ""}}
    (folder / "plan.json").write_text(json.dumps(stale))
    done = hapmoe(folder, "check", *COMMON, "--backend", "flagscale")
    assert done.returncode == 0, done.stdout
    assert "The job is not the one that the plan was made for" in done.stdout
    meshes = "mesh0-a100-80g-sxm 1x1x8x8x1, mesh1-h100-80g-sxm 1x1x8x8x1"
    assert f"inside the safe envelope: {meshes}" in done.stdout and "FlagScale v0.9.0" in done.stdout
    assert hapmoe(folder, "check", "plan.json").returncode == 2
    assert hapmoe(folder, "check", *COMMON, "--backend", "deepspeed").returncode == 2


def test_render_for_every_target(folder: Path) -> None:
    (folder / "options.yaml").write_text("kinds: {old: {partition: p1}, new: {partition: p2}}\n")
    wanted = {"slurm": "launch.sbatch", "kubernetes": "jobset.yaml", "flagscale": "flagscale/hostfile"}
    for name, file in wanted.items():
        done = hapmoe(folder, "render", *COMMON, "--target", name, "--options", "options.yaml", "--out", name)
        assert done.returncode == 0, done.stdout + done.stderr
        assert (folder / name / file).exists()
    assert "--partition=p2" in (folder / "slurm" / "launch.sbatch").read_text()
    again = hapmoe(folder, "render", "slurm/plan.json", *COMMON[1:], "--target", "torchrun", "--out", "slurm")
    assert again.returncode == 2 and "--force" in again.stderr
    patched = hapmoe(folder, "render", *COMMON, "--backend", "flagscale-patched", "--out", "patched")
    assert patched.returncode == 0 and (folder / "patched" / "flagscale" / "hapmoe-hetero.patch").exists()
    (folder / "options.yaml").write_text("kinds: {old: {arguments: [--lr, 1e-3]}}\n")
    wrong = hapmoe(folder, "render", *COMMON, "--options", "options.yaml", "--out", "no")
    assert wrong.returncode == 2 and "kinds.old.arguments: --lr may not differ between stages" in wrong.stderr
    (folder / "options.yaml").write_text("kinds: {old: {partitio: p1}}\n")
    wrong = hapmoe(folder, "render", *COMMON, "--options", "options.yaml", "--out", "no")
    assert wrong.returncode == 2 and "did you mean partition" in wrong.stderr and not (folder / "no").exists()


def test_replan_writes_the_resume_or_says_why_not(folder: Path) -> None:
    script = folder / "train.sh"
    text = Path(SCRIPT).read_text()
    script.write_text(text.replace('/pretrain_gpt.py"', '/pretrain_gpt.py" --save ckpt'))
    assert script.read_text() != text
    common = ("plan.json", "--script", "train.sh", "--cluster", "cluster.yaml", "--time-limit", "20")
    document = json.loads(hapmoe(folder, "replan", *common, "--json").stdout)
    assert document["possible"] and document["flags"][:2] == ["--load", "ckpt"]
    assert document["old_step_s"] >= document["new_step_s"] > 0
    words = (folder / "hapmoe-resume" / "args" / "common.args").read_text()
    assert "--load ckpt\n--exit-on-missing-checkpoint\n" in words
    done = hapmoe(folder, "replan", *common, "--set", "ep=1", "--set", "tp=1", "--out", "second")
    if done.returncode == 1 and "Cannot resume" in done.stdout:
        assert "KeyError 'optimizer'" in done.stdout and not (folder / "second").exists()
    else:
        assert "No plan fits" in done.stdout


def test_hosts_are_looked_at(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """``hapmoe check --hosts`` on the launch folder: every group answers, nothing is trained."""
    hosts = TwoHosts(tmp_path_factory.mktemp("hosts"))
    small = CLUSTER
    for host in HOSTS:
        small = small.replace("devices_per_node: 8", f"devices_per_node: 1, hosts: [{host}]", 1)
    (folder / "cluster.yaml").write_text(small)
    plan = {"micro_batch_size": 1, "stages": [{**stage, "dp": 1, "ep": 1} for stage in PLAN["stages"]]}  # type: ignore[attr-defined]
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "options.yaml").write_text(
        "kinds: {old: {env: {GLOO_SOCKET_IFNAME: eth0}}, new: {env: {GLOO_SOCKET_IFNAME: eth0}}}"
    )
    assert hapmoe(folder, "render", *COMMON, "--options", "options.yaml", "--out", "out").returncode == 0
    command = [sys.executable, "-m", "hapmoe", "check", str(folder / "out" / "plan.json"), "--hosts"]
    run = hosts.run(*command, PYTHONPATH=ENV["PYTHONPATH"], HAPMOE_TORCHRUN=str(hosts.bin / "torchrun"))
    assert run.code == 0 and "check_ranks: 2 ranks, every group answers" in run.stderr, run.stderr
    assert hapmoe(folder, "render", *COMMON, "--target", "slurm", "--out", "slurm").returncode == 0
    told = hapmoe(folder, "check", "slurm/plan.json", "--hosts")
    assert told.returncode == 2 and "HAPMOE_CHECK=only sbatch launch.sbatch" in told.stderr


def test_any_back_end_shows_what_another_would_gain() -> None:
    import hapmoe as library

    job = library.extract(SCRIPT)
    cluster = library.load_cluster(EXAMPLES / "clusters" / "a100-910b.yaml")
    planned = plan_job(job, cluster, backend="any", settings=("vpp=1",), time_limit_s=30)
    plan = planned.result.plan
    assert plan is not None
    named = {comparison.name: comparison for comparison in planned.comparisons}
    upstream, meshes = named["best plan of megatron"], named["best plan of flagscale"]
    assert "cannot join" in upstream.note and meshes.step_s is not None and not meshes.note
    own = plan_job(job, cluster, backend="flagscale", time_limit_s=30, compare=False).result.plan
    assert own is not None and own.launchable and check(job, cluster, own) == ()
    assert plan.launchable == (plan.backend in BACKENDS and bool(capabilities(plan.backend).module))


def test_report_and_trace_of_a_hand_written_plan(folder: Path) -> None:
    """Both are of the step that predict says."""
    predicted = hapmoe(folder, "predict", SCRIPT, "--plan", "plan.json", "--cluster", "cluster.yaml", "--json")
    step_s = json.loads(predicted.stdout)["estimate"]["step_s"]
    for command, file in (("report", "report.html"), ("trace", "trace.json")):
        done = hapmoe(folder, command, *COMMON)
        assert (done.returncode, done.stdout) == (0, f"{file} written\n"), done.stderr
        again = hapmoe(folder, command, *COMMON)
        assert again.returncode == 2 and "exists already" in again.stderr
        assert hapmoe(folder, command, *COMMON, "--force").returncode == 0
    assert json.loads((folder / "trace.json").read_text())["otherData"]["step_s"] == pytest.approx(step_s, rel=1e-9)
    report = (folder / "report.html").read_text()
    assert f'data-field="step_s" data-value="{step_s}"' in report
    assert hapmoe(folder, "trace", "plan.json", "--cluster", "cluster.yaml").returncode == 2


def test_a_comparison_that_was_cut_does_not_say_that_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    import hapmoe as library
    from hapmoe import planning

    job = library.extract(SCRIPT)
    cluster = library.load_cluster(EXAMPLES / "clusters" / "a100-910b.yaml")
    monkeypatch.setattr(planning, "COMPARED_S", 0.0)
    uniform = plan_job(job, cluster, settings=("vpp=1",)).comparisons[0]
    assert uniform.name == "best uniform plan" and "found within 0 s" in uniform.note
