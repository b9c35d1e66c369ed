"""Every example script on every example cluster: script, plan, files, the arguments of every rank, Megatron-Core.

What the script hands over is established by real bash, what a rank may be given by Megatron-Core itself.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from dryrun import Sandbox
from megatron_oracle import config_from, groups, parallel_state, parse
from script.bash_oracle import run_bash, stand_ins, training_of

import hapmoe
from hapmoe.cluster import Cluster
from hapmoe.job import JobSpec
from hapmoe.launch.write import write_files
from hapmoe.planning import artefacts, plan_job

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples").glob("*.sh"))
CLUSTERS = sorted((ROOT / "examples" / "clusters").glob("*.yaml"))

PLAN_OWNS = {
    # Arguments of the example scripts that say how the job is cut up; all others are the user's.
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
    "--sequence-parallel",
    "--pipeline-model-parallel-layout",
    "--micro-batch-size",
    "--recompute-activations",
    "--recompute-granularity",
    "--recompute-modules",
}
PARAMETERS = {"llama2-13b": 13.0e9, "mixtral-8x7b": 46.7e9, "qwen3-30b-a3b": 30.5e9, "deepseek-v3": 671e9}
"""As their authors publish them."""

STAND_IN = f"""#!{sys.executable}
# The ranks of one node, one after the other in this process, numbered as the static rendezvous does.
import os, runpy, sys
options = dict(zip(sys.argv[1:11:2], sys.argv[2:12:2]))
assert options["--rdzv-backend"] == "static", options
entry, node = sys.argv[11], int(options["--node-rank"])
table = [line.split() for line in open(os.path.join(os.path.dirname(entry), "hosts.tsv")) if line[0].isdigit()]
slots = [int(row[3]) for row in table]
assert slots[node] == int(options["--nproc-per-node"]) and len(table) == int(options["--nnodes"])
before = dict(os.environ)
for local in range(slots[node]):
    os.environ.clear()
    os.environ.update(before, RANK=str(sum(slots[:node]) + local), LOCAL_RANK=str(local), WORLD_SIZE=str(sum(slots)))
    sys.argv = [entry]
    runpy.run_path(entry, run_name="__main__")
"""


@pytest.fixture(scope="session")
def shims(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_ins(tmp_path_factory.mktemp("shims"))


@pytest.fixture(scope="session")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bin") / "torchrun"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    return path


@cache
def job_of(script: Path) -> JobSpec:
    return hapmoe.extract(script)


@cache
def users_words(script: Path, shims: Path) -> list[str]:
    """The words that real bash hands to the training program, without those that the plan decides."""
    folder = shims.parent / f"run-{script.stem}-{os.getpid()}"
    folder.mkdir()
    copy = folder / script.name
    copy.write_bytes(script.read_bytes())
    words = training_of(run_bash(copy, (), {}, shims))
    assert words is not None
    kept, dropping = [], False
    for word in words:
        if word.startswith("--"):
            dropping = word in PLAN_OWNS
        if not dropping:
            kept.append(word)
    return kept


def same_word(given: str, real: str) -> bool:
    """Dry runs name what only the run tells: in the examples that is the date in one folder's name."""
    varies = re.compile(r"\d{8}-\d{4}")
    if re.fullmatch(r"\$\{HAPMOE_VAR_\d+\}", given):
        return bool(varies.search(real))
    return given == real or (bool(varies.search(real)) and varies.sub("", given) == varies.sub("", real))


def model_arguments(argv: list[str]) -> dict[str, Any]:
    """The model's part of a rank's arguments, under the names of ``TransformerConfig``."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("num-query-groups", "kv-channels", "moe-ffn-hidden-size", "moe-router-topk", "mtp-num-layers"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--moe-shared-expert-intermediate-size", type=int)
    parser.add_argument("--num-experts", type=int, dest="num_moe_experts")
    parser.add_argument("--moe-layer-freq", type=lambda text: eval(text, {"__builtins__": {}}))  # Megatron does too
    parser.add_argument("--moe-token-dispatcher-type")
    parser.add_argument("--normalization")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--multi-latent-attention", action="store_true")
    parser.add_argument("--moe-grouped-gemm", action="store_true")
    parser.add_argument("--disable-bias-linear", action="store_false", dest="add_bias_linear")
    given = vars(parser.parse_known_args(argv)[0])
    return {name: value for name, value in given.items() if value is not None}


def check_plan(job: JobSpec, cluster: Cluster, plan: dict[str, Any]) -> None:
    """plan.json by arithmetic alone, then by HAPMoE's own rules and estimate."""
    stages, layers = plan["stages"], job.model.num_layers
    assert sum(stage["num_layers"] for stage in stages) == layers
    at = 0
    for chunk in range(plan["vpp"]):
        for stage in stages:
            assert stage["virtual_layers"][chunk][0] == at
            at += stage["virtual_layers"][chunk][1]
    assert at == layers
    assert sum(stage["mtp_layers"] for stage in stages) == stages[-1]["mtp_layers"] == job.model.mtp_layers
    used: Counter[tuple[str, int]] = Counter()
    rank = 0
    for stage in stages:
        devices = stage["num_devices"]
        assert stage["first_rank"] == rank and devices == stage["tp"] * stage["cp"] * stage["dp"]
        assert devices % (stage["etp"] * stage["ep"]) == 0
        assert stage["device"] == cluster.pool(stage["pool"]).device.name
        rank += devices
        used.update({(stage["pool"], node): devices // len(stage["nodes"]) for node in stage["nodes"]})
        step = stage["dp"] * plan["micro_batch_size"]
        assert plan["global_batch_size"] == job.training.global_batch_size == plan["num_microbatches"] * step
    for (name, node), count in used.items():
        assert node < cluster.pool(name).nodes and count <= cluster.pool(name).devices_per_node
    estimate = plan["estimate"]
    assert estimate["fits"] and len(estimate["stages"]) == len(stages)
    for part in estimate["stages"]:
        assert sum(part["memory"].values()) == pytest.approx(part["memory_bytes"])
        assert part["memory_bytes"] <= part["memory_limit_bytes"]
    assert estimate["ideal_s"] <= estimate["step_s"] and 0 < estimate["mfu"] < 1
    loaded = hapmoe.load_plan(plan)
    assert hapmoe.check(job, cluster, loaded) == ()
    assert hapmoe.evaluate(job, cluster, loaded).step_s == pytest.approx(estimate["step_s"], rel=1e-12)


def check_rank(plan: dict[str, Any], rank: int, argv: list[str], world: int) -> None:
    """One rank's arguments make Megatron-Core's groups and configuration, and these are the plan's."""
    args = parse(argv)
    config = config_from(args, **model_arguments(argv))
    index = next(
        i for i, s in enumerate(plan["stages"]) if s["first_rank"] <= rank < s["first_rank"] + s["num_devices"]
    )
    stage = plan["stages"][index]
    assert (args.tensor_model_parallel_size, args.context_parallel_size) == (stage["tp"], stage["cp"])
    assert args.pipeline_model_parallel_size == len(plan["stages"])
    assert args.micro_batch_size == plan["micro_batch_size"] and args.global_batch_size == plan["global_batch_size"]
    recompute = stage["recompute"]
    assert (args.recompute_granularity or "none") == recompute["granularity"]
    assert (args.recompute_modules or []) == recompute["modules"]
    assert (args.recompute_method, args.recompute_num_layers or 0) == (recompute["method"], recompute["num_layers"])
    layout = config.pipeline_model_parallel_layout
    vpp = layout.virtual_pipeline_model_parallel_size if layout else 1
    assert vpp == plan["vpp"] and (layout is not None or len(plan["stages"]) == 1)
    with groups(
        world,
        rank,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    ):
        assert parallel_state.get_pipeline_model_parallel_rank() == index
        assert parallel_state.get_data_parallel_world_size() == stage["dp"]
        if config.num_moe_experts:
            assert parallel_state.get_expert_model_parallel_world_size() == stage["ep"]
            assert parallel_state.get_expert_tensor_parallel_world_size() == stage["etp"]
        if layout:
            for chunk, (first, count) in enumerate(stage["virtual_layers"]):
                assert layout.get_layer_id_list(vp_stage=chunk) == list(range(first, first + count))


def dry_run(folder: Path, torchrun: Path, node: int, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "HAPMOE_TORCHRUN": str(torchrun), "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {"NODE_RANK": str(node), "MASTER_ADDR": "node0", "MASTER_PORT": "29500", **variables}
    return subprocess.run([folder / "run_node.sh"], env=env, capture_output=True, text=True, timeout=60, check=False)


def go_through(script: Path, cluster: Cluster, tmp_path: Path, shims: Path, torchrun: Path, some: int = 0) -> None:
    """Script and cluster to Megatron; ``some``: only so many ranks, of the first and the last node."""
    job = job_of(script)
    planned = plan_job(job, cluster, compare=False)
    result = planned.result
    if result.plan is None:
        assert result.status == "infeasible" and result.report is not None
        assert result.report.reasons and "lacks" in result.report.reasons[0]
        return
    folder = write_files(tmp_path / "plan", artefacts(job, cluster, planned))
    plan = json.loads((folder / "plan.json").read_text())
    check_plan(job, cluster, plan)

    table = [line.split("\t") for line in (folder / "hosts.tsv").read_text().splitlines() if line[0].isdigit()]
    rows: dict[int, dict[str, Any]] = {}
    kinds = {}
    rank = 0
    for node, (_, _, kind, slots, _) in enumerate(table):
        kinds.update(dict.fromkeys(range(rank, rank + int(slots)), kind))
        rank += int(slots)
        if some and node not in (0, len(table) - 1):
            continue
        done = dry_run(folder, torchrun, node, HAPMOE_DRY_RUN="1")
        assert done.returncode == 0, done.stderr
        rows.update({row["rank"]: row for row in map(json.loads, done.stdout.splitlines())})
    world = sum(stage["num_devices"] for stage in plan["stages"])
    assert rank == world and (some or sorted(rows) == list(range(world)))
    user = users_words(script, shims)
    for rank, row in rows.items():
        stage = plan["stages"][row["stage"]]
        assert stage["first_rank"] <= rank < stage["first_rank"] + stage["num_devices"]
        assert kinds[rank] == stage["device"]
        assert row["program"].endswith("pretrain_gpt.py")
        assert len(row["argv"]) > len(user) and all(map(same_word, row["argv"], user)), (row["argv"], user)
        assert Counter(word for word in row["argv"] if word in PLAN_OWNS).most_common(1)[0][1] == 1
    firsts = {stage["first_rank"] for stage in plan["stages"]} if not some else set()
    for rank in sorted({min(rows), max(rows), *firsts}):
        check_rank(plan, rank, rows[rank]["argv"], world)

    vendors = {cluster.pool(stage["pool"]).device.vendor for stage in plan["stages"]}
    assert plan["launchable"] == (len(vendors) == 1)
    if not plan["launchable"]:
        assert "Megatron-LM upstream cannot join" in plan["launch_reason"]
        stopped = dry_run(folder, torchrun, 0)
        assert stopped.returncode == 2 and not stopped.stdout
        assert stopped.stderr.splitlines() == [f"run_node.sh: {plan['launch_reason']}"]
    # No time limit was set: the search ends with a certificate.
    assert (result.status, result.gap) == ("optimal", 0.0)
    assert plan["estimate"]["lower_bound_s"] == pytest.approx(plan["estimate"]["step_s"])


@pytest.mark.parametrize("cluster_file", CLUSTERS, ids=lambda path: path.stem)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_to_megatron(script: Path, cluster_file: Path, tmp_path: Path, shims: Path, torchrun: Path) -> None:
    cluster = hapmoe.load_cluster(cluster_file)
    go_through(script, cluster, tmp_path, shims, torchrun)
    memory = sum(pool.nodes * pool.devices_per_node * pool.device.memory_bytes for pool in cluster.pools)
    found = (tmp_path / "plan").exists()
    # bf16 weights and fp32 gradients, master weights and two moments of Adam: 18 bytes, sharded or not.
    if parameters := PARAMETERS.get(script.stem):
        assert found or 18 * parameters > 0.6 * memory
        assert not found or 18 * parameters < memory


def test_deepseek_v3_where_it_fits(tmp_path: Path, shims: Path, torchrun: Path) -> None:
    """512 H800: dense layers first, an MTP layer behind the last."""
    large = tmp_path / "large.yaml"
    large.write_text("pools: [{name: h800, device: h800-80g-sxm, nodes: 64}]\n")
    go_through(ROOT / "examples" / "deepseek-v3.sh", hapmoe.load_cluster(large), tmp_path, shims, torchrun, some=2)
    assert (tmp_path / "plan" / "plan.json").exists()


@pytest.mark.parametrize(("script", "cluster_file"), [("qwen3-30b-a3b", "h100-h20"), ("mixtral-8x7b", "a100-h100")])
def test_launched_for_real(script: str, cluster_file: str, tmp_path: Path, shims: Path) -> None:
    """The whole way by commands: ``hapmoe plan``, host names, launch.sh; the trainer is a stand-in."""
    path = ROOT / "examples" / f"{script}.sh"
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "src")}
    command = [
        sys.executable,
        "-m",
        "hapmoe",
        "plan",
        "-e",
        "MEGATRON_PATH=.",
        str(path),
        "--json",
        "--out",
        "out",
        "--cluster",
    ]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "clusters" / f"{cluster_file}.yaml")],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan == json.loads((tmp_path / "out" / "plan.json").read_text())
    hosts = tmp_path / "out" / "hosts.tsv"
    hosts.write_text(hosts.read_text().replace("CHANGE-ME-", ""))
    run = Sandbox(tmp_path).run(tmp_path / "out", "launch.sh", HAPMOE_SKIP_DEVICE_CHECK="1")
    world = sum(stage["num_devices"] for stage in plan["stages"])
    assert run.code == 0, run.stderr
    assert sorted(run.ranks) == list(range(world))
    user = users_words(path, shims)
    for rank in range(world):
        assert all(map(same_word, run.argv(rank), user)), (run.argv(rank), user)
    assert len({tuple(run.argv(rank)[: len(user)]) for rank in range(world)}) == 1
    assert {run.env(rank)["CUDA_DEVICE_MAX_CONNECTIONS"] for rank in range(world)} == {"1"}
