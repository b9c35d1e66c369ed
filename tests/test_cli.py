"""The command line as people meet it: one clear line for what is wrong, the right exit code, nothing left behind.

Exit codes: 0 done, 1 an answer that is no, 2 bad input, 130 interrupted, 70 a bug of ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
H100 = str(EXAMPLES / "clusters" / "h100.yaml")
SCRIPT = str(EXAMPLES / "mixtral-8x7b.sh")
ENV = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "src"), "HOME": "/nonexistent", "COLUMNS": "100"}
HAPMOE = [sys.executable, "-m", "hapmoe"]

Done = subprocess.CompletedProcess[str]


def run(folder: Path, *words: str, limit: float = 120) -> Done:
    return subprocess.run([*HAPMOE, *words], cwd=folder, env=ENV, capture_output=True, text=True, timeout=limit)


def refused(folder: Path, *words: str) -> str:
    """The one line of a run with bad input, which writes nothing anywhere."""
    before = sorted(path for path in folder.rglob("*"))
    done = run(folder, *words)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stdout == "", done.stdout
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("hapmoe: "), done.stderr
    assert sorted(path for path in folder.rglob("*")) == before
    return lines[0]


def cluster(folder: Path, text: str) -> str:
    (folder / "cluster.yaml").write_text(text)
    return "cluster.yaml"


# ------------------------------------------------------------------------------------- bad input

SCRIPTS = {
    "empty": (b"", "train.sh: the script is empty"),
    "blank": (b" \n\n", "train.sh"),
    "binary": (bytes(range(256)) * 8, "train.sh: is a binary file"),
    "launches nothing": (b"echo hello\n", "train.sh: the script starts no training"),
    "unreadable shell": (b"if then fi (\n", "train.sh"),
    "a value only the run tells": (b"torchrun pretrain_gpt.py --num-layers $(count)\n", "train.sh:1"),
}


@pytest.mark.parametrize("command", ["plan", "predict", "extract"])
@pytest.mark.parametrize("kind", SCRIPTS)
def test_bad_scripts(tmp_path: Path, kind: str, command: str) -> None:
    content, said = SCRIPTS[kind]
    (tmp_path / "train.sh").write_bytes(content)
    more = [] if command == "extract" else ["--cluster", H100]
    line = refused(tmp_path, command, "train.sh", *more)
    assert line.startswith(f"hapmoe: {said}")


def test_no_script_there(tmp_path: Path) -> None:
    assert "missing.sh: no such file" in refused(tmp_path, "plan", "missing.sh", "--cluster", H100)
    (tmp_path / "folder").mkdir()
    assert "folder: is a folder" in refused(tmp_path, "plan", "folder", "--cluster", H100)


POOL = "pools: [{{name: a, device: h100-80g-sxm, nodes: {}}}]"
CLUSTERS = {
    "unknown device": ("pools: [{name: a, device: h100-80g-sx, nodes: 1}]", "pools[0].device", "h100-80g-sxm"),
    "ambiguous device": ("pools: [{name: a, device: h100, nodes: 1}]", "pools[0].device", "h100-80g-pcie"),
    "no nodes": (POOL.format(0), "pools[0].nodes", "0"),
    "negative nodes": (POOL.format(-4), "pools[0].nodes", "-4"),
    "nodes in words": (POOL.format("four"), "pools[0].nodes", "four"),
    "no unit": (POOL.format("1, network: {bandwidth: 400}"), "pools[0].network.bandwidth", "400 Gb/s"),
    "absurd": (POOL.format("1, network: {bandwidth: 4 Mb/s}"), "pools[0].network.bandwidth", "outside"),
    "unknown key": ("pools: [{name: a, device: h100-80g-sxm, node: 4}]", "pools[0]", "did you mean nodes?"),
    "unknown section": ("pool: []", "unknown key 'pool'", "pools"),
    "no pools": ("pools: []", "pools", ""),
    "not YAML": ("pools: [", "line 2", ""),
    "empty": ("", "empty", ""),
}


@pytest.mark.parametrize("kind", CLUSTERS)
def test_bad_clusters(tmp_path: Path, kind: str) -> None:
    text, where, hint = CLUSTERS[kind]
    line = refused(tmp_path, "plan", SCRIPT, "--cluster", cluster(tmp_path, text))
    assert line.startswith("hapmoe: cluster.yaml") and where in line and hint in line


def test_gigabytes_per_second_are_read_as_bytes_and_shown(tmp_path: Path) -> None:
    """Eight times the Gb/s that were probably meant: accepted, but said."""
    name = cluster(tmp_path, POOL.format("1, network: {bandwidth: 400 GB/s}"))
    done = run(tmp_path, "predict", SCRIPT, "--cluster", name, "--json", "-e", "NNODES=1")
    assert done.returncode in (0, 1), done.stderr
    shown = run(
        tmp_path,
        "plan",
        str(EXAMPLES / "mixtral-s.sh"),
        "--cluster",
        cluster(tmp_path, POOL.format("4, network: {bandwidth: 400 GB/s}")),
    )
    assert shown.returncode == 0, shown.stderr
    assert "400 GB/s read as bytes (3,200 Gb/s per NIC)" in " ".join(shown.stdout.split())


OPTIONS = [
    (["--planner", "best"], "exact, uniform"),
    (["--backend", "megatorn"], "megatron"),
    (["--target", "cron"], "torchrun"),
    (["--set", "speed=9"], "no key 'speed'"),
    (["--set", "tp"], "KEY=VALUE"),
    (["--set", "tp=fast"], "tp=fast"),
    (["--set", "tp=8..2"], "tp=8..2"),
    (["--set", "tp=0"], "tp=0"),
    (["--set", "order=h100,nowhere"], "nowhere"),
    (["--top", "0"], "--top"),
    (["--time-limit", "-1"], "--time-limit"),
    (["--time-limit", "soon"], "--time-limit"),
    (["--env", "1=2"], "--env"),
    (["--env", "NAME"], "--env"),
    (["--imbalance", "0.5"], "--imbalance"),
    (["--vocab-size", "0"], "--vocab-size"),
    (["--megatron-version", "latest"], "latest"),
]


@pytest.mark.parametrize(
    ("options", "said"), OPTIONS, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_bad_options(tmp_path: Path, options: list[str], said: str) -> None:
    assert said in refused(tmp_path, "plan", SCRIPT, "--cluster", H100, *options)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan"], "SCRIPT"),
        (["plan", SCRIPT], "--cluster"),
        (["plan", SCRIPT, "--cluster", "nowhere.yaml"], "nowhere.yaml"),
        (["plan", SCRIPT, "--cluster", "."], ".: "),
        (["predict", "--cluster", H100], "no script"),
        (["predict", SCRIPT, "--cluster", H100, "--plan", "nowhere.json"], "nowhere.json"),
        (["plna"], "plna"),
        (["devices", "h100"], "h100-80g-pcie"),
        (["devices", "abacus"], "abacus"),
        (["devices", "--all"], "--all"),
    ],
    ids=lambda value: " ".join(Path(word).name for word in value) if isinstance(value, list) else "",
)
def test_what_is_missing_or_unknown(tmp_path: Path, words: list[str], said: str) -> None:
    assert said in refused(tmp_path, *words)


PLANS = {
    "not JSON": ("{", "not JSON"),
    "unknown field": ('{"stages": [{"pool": "h100", "num_layers": 32, "tq": 1}], "micro_batch_size": 1}', "tq"),
    "another schema": ('{"schema": 9, "stages": [], "micro_batch_size": 1}', "schema"),
    "text for a number": ('{"stages": [], "micro_batch_size": "one"}', "micro_batch_size"),
    "binary": ("\x00\x01", "plan.json"),
}


@pytest.mark.parametrize("kind", PLANS)
def test_bad_plans(tmp_path: Path, kind: str) -> None:
    text, said = PLANS[kind]
    (tmp_path / "plan.json").write_text(text)
    line = refused(tmp_path, "predict", SCRIPT, "--cluster", H100, "--plan", "plan.json")
    assert line.startswith("hapmoe: plan.json") and said in line


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "missing.sh", "--cluster", H100],
        ["plan", SCRIPT, "--cluster", H100, "--planner", "best"],
        ["plan", SCRIPT, "--cluster", H100, "--top", "0"],
        ["plan"],
        ["predict", SCRIPT, "--cluster", "missing.yaml"],
        ["devices", "abacus"],
        ["extract", "missing.sh"],
    ],
    ids=lambda words: " ".join(Path(word).name for word in words),
)
def test_errors_as_json(tmp_path: Path, words: list[str]) -> None:
    done = run(tmp_path, *words, "--json")
    assert done.returncode == 2
    document = json.loads(done.stdout)  # one document and nothing else
    assert document.get("error") or document.get("refused")


# --------------------------------------------------------------------------------- output folder


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "thesis"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    for force in ([], ["--force"]):
        line = refused(tmp_path, "plan", SCRIPT, "--cluster", H100, "--out", "thesis", *force)
        assert line.startswith("hapmoe: thesis: ")
    assert (foreign / "notes.txt").read_text() == "mine"
    assert "thesis/notes.txt" in refused(tmp_path, "plan", SCRIPT, "--cluster", H100, "--out", "thesis/notes.txt")
    nowhere = refused(tmp_path, "plan", SCRIPT, "--cluster", H100, "--out", "/proc/hapmoe")  # for root as well
    assert nowhere.startswith("hapmoe: /proc/hapmoe: ")


def test_a_plan_is_replaced_only_when_asked(tmp_path: Path) -> None:
    command = ["plan", SCRIPT, "--cluster", H100, "--out", "out"]
    assert run(tmp_path, *command).returncode == 0
    hosts = tmp_path / "out" / "hosts.tsv"
    hosts.write_text(hosts.read_text().replace("CHANGE-ME-h100-0", "node17"))
    assert "--force" in refused(tmp_path, *command)
    assert "node17" in hosts.read_text()
    assert run(tmp_path, *command, "--force", "--planner", "uniform").returncode == 0
    assert json.loads((tmp_path / "out" / "plan.json").read_text())["planner"] == "uniform"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """A limit on file size stands in for it: the report alone is larger."""
    command = f'ulimit -f 8; exec {sys.executable} -m hapmoe plan "$1" --cluster "$2"'
    done = subprocess.run(
        ["bash", "-c", command, "bash", SCRIPT, H100], cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stderr.startswith("hapmoe: hapmoe-plan: ") and len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------------- answers


def test_an_impossible_job_is_an_answer(tmp_path: Path) -> None:
    small = str(EXAMPLES / "clusters" / "16-1.yaml")
    large = str(EXAMPLES / "deepseek-v3.sh")
    done = run(tmp_path, "plan", large, "--cluster", small)
    assert done.returncode == 1 and done.stderr == ""
    assert "No plan fits" in done.stdout and "GiB per device" in done.stdout
    done = run(tmp_path, "plan", large, "--cluster", small, "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 1 and document["search"]["status"] == "infeasible" and document["search"]["reasons"]
    assert list(tmp_path.iterdir()) == []


def test_pins_that_nothing_meets(tmp_path: Path) -> None:
    for pins in (["tp=3"], ["tp=2", "tp=4"]):  # 32 heads; repeats conjoin
        done = run(tmp_path, "plan", SCRIPT, "--cluster", H100, *(word for pin in pins for word in ("--set", pin)))
        assert done.returncode == 1 and "No plan fits" in done.stdout and list(tmp_path.iterdir()) == []


def test_json_is_one_document_and_the_written_plan(tmp_path: Path) -> None:
    done = run(tmp_path, "plan", SCRIPT, "--cluster", H100, "--json", "--out", "out")
    assert done.returncode == 0 and done.stderr == ""
    document = json.loads(done.stdout)
    assert document == json.loads((tmp_path / "out" / "plan.json").read_text())
    assert document["search"]["status"] == "optimal" and document["schema"] == 1
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"plan.json", "hosts.tsv", "args", "env", "entry.py", "run_node.sh", "launch.sh", "report.html"}

    predicted = run(tmp_path, "predict", SCRIPT, "--cluster", H100, "--plan", "out/plan.json", "--json")
    assert predicted.returncode == 0, predicted.stderr
    again = json.loads(predicted.stdout)
    assert again["legal"] is True and again["fits"] is True and again["violations"] == []
    for key, value in document["estimate"].items():
        if key != "lower_bound_s":  # what the search proved; a prediction proves nothing
            assert again["estimate"][key] == value, key
    assert again["stages"] == document["stages"]


def test_time_limit_with_a_plan_in_hand(tmp_path: Path) -> None:
    done = run(tmp_path, "plan", SCRIPT, "--cluster", H100, "--json", "--time-limit", "0.01")
    document = json.loads(done.stdout)
    if done.returncode == 0:
        assert document["search"]["status"] in ("optimal", "feasible") and 0 <= document["search"]["gap"] < 1
    else:
        assert done.returncode == 1 and document["stages"] == []


MIXTRAL = """\
torchrun --nproc-per-node {gpus} --nnodes 1 pretrain_gpt.py --num-layers {layers} --hidden-size 1024 \\
    --num-attention-heads 16 --ffn-hidden-size 4096 --seq-length 2048 --max-position-embeddings 2048 \\
    --vocab-size 32000 --swiglu --bf16 --num-experts 16 --moe-router-topk 2 --moe-grouped-gemm \\
    --moe-token-dispatcher-type alltoall --use-distributed-optimizer --micro-batch-size 1 \\
    --global-batch-size 64 --sequence-parallel {more}
"""
TP, PP, EP, CP = (f"--{name}-parallel-size" for name in ("tensor-model", "pipeline-model", "expert-model", "context"))
ETP = "--expert-tensor-parallel-size"

REPORTS = [
    # (devices, layers, the user's degrees, exit code, words that the answer must have)
    pytest.param(4, 8, f"{TP} 4 {EP} 4 {ETP} 1", 0, [], id="bridge-546"),
    pytest.param(
        4, 8, f"{TP} 4 {EP} 4", 1, ["16 > 4", "ETP", "--expert-tensor-parallel-size 1"], id="bridge-546-unset"
    ),
    pytest.param(8, 8, f"{TP} 2 {EP} 8", 1, ["16 > 8", "ETP", "--expert-tensor-parallel-size 1"], id="nemo-14838"),
    pytest.param(8, 8, f"{PP} 2 {EP} 8 {ETP} 1", 1, ["16 > 8"], id="slime-1818"),
    pytest.param(16, 8, f"{EP} 16 {ETP} 1", 0, [], id="bridge-4980"),
    pytest.param(16, 8, f"{TP} 4 {CP} 2 {EP} 16 {ETP} 1", 0, [], id="bridge-4980-folded"),
    pytest.param(4, 30, f"{PP} 4 {EP} 1 {ETP} 1", 1, ["30"], id="megatron-1304"),
]


@pytest.mark.parametrize(("devices", "layers", "more", "code", "said"), REPORTS)
def test_public_reports(tmp_path: Path, devices: int, layers: int, more: str, code: int, said: list[str]) -> None:
    """Configurations that users asked about in public, as scripts; the verdicts are Megatron's."""
    (tmp_path / "train.sh").write_text(MIXTRAL.format(gpus=min(devices, 8), layers=layers, more=more))
    nodes, each = max(1, devices // 8), min(devices, 8)
    name = cluster(tmp_path, POOL.format(f"{nodes}, devices_per_node: {each}"))
    done = run(tmp_path, "predict", "train.sh", "--cluster", name)
    assert done.returncode == code, (done.stdout, done.stderr)
    assert done.stderr == ""
    text = " ".join(done.stdout.split())
    assert all(word in text for word in said), text
    document = json.loads(run(tmp_path, "predict", "train.sh", "--cluster", name, "--json").stdout)
    assert document["legal"] is (code == 0)
    if code == 0:
        stage = document["stages"][0]
        assert stage["num_devices"] * len(document["stages"]) == devices
        assert stage["num_devices"] // (stage["ep"] * stage["etp"]) == 1  # EDP


def test_memory_of_each_stage_from_its_own_layers(tmp_path: Path) -> None:
    """Megatron-Bridge 5077: 8 layers over 4 stages as 1/2/2/3; the last stage carries three."""
    (tmp_path / "train.sh").write_text(MIXTRAL.format(gpus=4, layers=8, more=f"{PP} 4 {EP} 1 {ETP} 1"))
    name = cluster(tmp_path, POOL.format("1, devices_per_node: 4"))
    stages = [{"pool": "a", "num_layers": count} for count in (1, 2, 2, 3)]
    (tmp_path / "plan.json").write_text(json.dumps({"stages": stages, "micro_batch_size": 1}))
    done = run(tmp_path, "predict", "train.sh", "--cluster", name, "--plan", "plan.json", "--json")
    assert done.returncode == 0, (done.stdout, done.stderr)
    document = json.loads(done.stdout)
    weights = [stage["memory"]["weights"] for stage in document["estimate"]["stages"]]
    # bf16, per layer: attention 4 h^2, router 16 h, 16 SwiGLU experts of 3 h f; norms aside.
    layer = 2 * (4 * 1024**2 + 16 * 1024 + 16 * 3 * 1024 * 4096)
    vocabulary = 2 * 32000 * 1024
    expected = (layer + vocabulary, 2 * layer, 2 * layer, 3 * layer + vocabulary)
    assert weights == pytest.approx(expected, rel=0.02)


def test_what_does_not_fit_is_an_answer(tmp_path: Path) -> None:
    """Mixtral-L as its script stands, on 16 devices of 80 GB: 141e9 parameters at 18 bytes do not."""
    name = str(EXAMPLES / "clusters" / "16-1-h.yaml")
    legal = ["-e", "NNODES=2"]
    done = run(tmp_path, "predict", str(EXAMPLES / "mixtral-8x7b.sh"), "--cluster", name, "--json", *legal)
    document = json.loads(done.stdout)
    assert done.returncode == 1 and document["legal"] is False  # EP 8 in stages of 4
    (tmp_path / "train.sh").write_text(MIXTRAL.format(gpus=8, layers=512, more=f"{EP} 8 {ETP} 1"))
    done = run(tmp_path, "predict", "train.sh", "--cluster", cluster(tmp_path, POOL.format(1)), "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["legal"], document["fits"]) == (1, True, False)


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ({"pool": "h100", "num_layers": 32, "tp": 0}, "tp is 0"),
        ({"pool": "moon", "num_layers": 32}, "moon"),
        ({"pool": "h100", "num_layers": 31}, "31"),
        ({"pool": "h100", "num_layers": 32, "ep": 5}, "5"),
        ({"pool": "h100", "num_layers": 32, "ep": 8}, "8 > 1"),
        ({"pool": "h100", "num_layers": 32, "dp": 64}, "64"),
        ({"pool": "h100", "num_layers": 32, "recompute": {"granularity": "full"}}, "recompute"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("vpp", [1, 0, 3])
def test_impossible_plans_are_answers(tmp_path: Path, stage: dict[str, object], said: str, vpp: int) -> None:
    """Never a traceback: the rules say what is wrong, with exit code 1."""
    (tmp_path / "plan.json").write_text(json.dumps({"stages": [stage], "micro_batch_size": 1, "vpp": vpp}))
    done = run(tmp_path, "predict", SCRIPT, "--cluster", H100, "--plan", "plan.json")
    assert done.returncode == 1 and done.stderr == "", (done.stdout, done.stderr)
    assert said.lower() in done.stdout.lower() or vpp != 1, done.stdout


# -------------------------------------------------------------------------------- extract, devices


def test_extract_json_has_the_documented_shape(tmp_path: Path) -> None:
    done = run(tmp_path, "extract", SCRIPT, "--json", "-e", "NNODES=4")
    assert done.returncode == 0 and done.stderr == ""
    document = json.loads(done.stdout)
    assert {"argv", "entry", "launcher", "world_size", "nodes", "devices_per_node", "env", "refused"} <= set(document)
    assert (document["nodes"], document["devices_per_node"], document["world_size"]) == (4, 8, 32)
    assert document["launcher"] == "torchrun" and document["entry"] == "./pretrain_gpt.py"
    assert document["refused"] is None and document["env"] == {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NNODES": "4"}
    assert document["argv"][:2] == ["--seq-length", "4096"] and all(isinstance(word, str) for word in document["argv"])

    (tmp_path / "train.sh").write_text(MIXTRAL.format(gpus=8, layers=8, more="--save run-$(date +%s)"))
    unknown = json.loads(run(tmp_path, "extract", "train.sh", "--json").stdout)["argv"][-1]
    assert list(unknown) == ["unknown"] and unknown["unknown"]

    (tmp_path / "train.sh").write_text("echo nothing\n")
    done = run(tmp_path, "extract", "train.sh", "--json")
    assert done.returncode == 2 and "starts no training" in json.loads(done.stdout)["refused"]


def test_extract_writes_once(tmp_path: Path) -> None:
    assert run(tmp_path, "extract", SCRIPT, "--out", "job.yaml").returncode == 0
    text = (tmp_path / "job.yaml").read_text()
    assert "num_layers: 32" in text
    assert "job.yaml" in refused(tmp_path, "extract", SCRIPT, "--out", "job.yaml")
    assert (tmp_path / "job.yaml").read_text() == text
    assert "no/such/job.yaml" in refused(tmp_path, "extract", SCRIPT, "--out", "no/such/job.yaml")


def test_devices(tmp_path: Path) -> None:
    every = run(tmp_path, "devices")
    names = [entry["name"] for entry in json.loads(run(tmp_path, "devices", "--json").stdout)]
    assert every.returncode == 0 and len(names) >= 20
    assert all(any(line.startswith(name) for line in every.stdout.splitlines()) for name in names)
    one = run(tmp_path, "devices", "h200")  # a unique prefix
    assert one.returncode == 0 and "h200-141g-sxm" in one.stdout and "NVIDIA H200 data sheet" in one.stdout
    (entry,) = json.loads(run(tmp_path, "devices", "mi300x", "--json").stdout)
    assert entry["vendor"] == "amd" and entry["ccl"] == "rccl"
    assert all(figure["source"] for figure in entry["figures"])


# ----------------------------------------------------------------------------------- being a program


def test_help_is_instant_and_complete(tmp_path: Path) -> None:
    bare = run(tmp_path)
    assert bare.returncode == 0 and bare.stdout == run(tmp_path, "--help").stdout
    for command in ("plan", "predict", "extract", "devices"):
        assert command in bare.stdout
        done = run(tmp_path, command, "-h")
        assert done.returncode == 0 and done.stdout.startswith(f"Usage: hapmoe {command} ")
    assert run(tmp_path, "--version").stdout.startswith("hapmoe, version ")


def loaded(*words: str, folder: Path) -> set[str]:
    """Top-level modules that a run of the command loads."""
    code = (
        "import sys\nsys.argv[0] = 'hapmoe'\nfrom hapmoe.__main__ import main\n"
        "try: main()\nfinally: print('\\n', *{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=folder, env=ENV, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_modules_are_loaded_when_needed(tmp_path: Path) -> None:
    heavy = {"numpy", "rich", "jinja2", "tree_sitter", "tree_sitter_bash", "torch", "yaml", "msgspec", "megatron"}
    assert not loaded("--help", folder=tmp_path) & heavy
    assert not loaded("plan", "--help", folder=tmp_path) & heavy
    assert not loaded("--version", folder=tmp_path) & heavy
    planning = loaded("plan", SCRIPT, "--cluster", H100, folder=tmp_path)
    assert "numpy" in planning and not planning & {"torch", "megatron", "matplotlib", "scipy", "pandas"}


def test_the_python_names_are_functions_whatever_came_first() -> None:
    """Modules are called plan and extract too; they must not take the functions' places."""
    first = ["hapmoe.plan", "hapmoe.extract", "hapmoe.planning", "hapmoe.api", "hapmoe.cli"]
    for module in first:
        code = (
            f"import {module}\nimport hapmoe\n"
            "for _ in range(2):\n  assert all(callable(getattr(hapmoe, name)) for name in hapmoe.__all__)\n"
            "from hapmoe.plan import Plan\nfrom hapmoe import plan, extract\n"
            "assert callable(plan) and callable(extract)"
        )
        done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def test_a_reader_that_goes_away(tmp_path: Path) -> None:
    """``hapmoe devices | head -1``: no traceback, no complaint at exit."""
    for words in (["devices"], ["devices", "--json"], ["--help"], ["extract", SCRIPT, "--json"]):
        producer = subprocess.Popen(
            [*HAPMOE, *words], cwd=tmp_path, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert producer.stdout is not None and producer.stderr is not None
        producer.stdout.close()
        said = producer.stderr.read().decode()
        producer.stderr.close()
        assert (producer.wait(60), said) == (0, ""), (words, said)


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command that waits for its input: the script is a pipe that nobody writes to."""
    os.mkfifo(tmp_path / "cluster.yaml")
    started = subprocess.Popen(
        [*HAPMOE, "plan", SCRIPT, "--cluster", "cluster.yaml"],
        cwd=tmp_path,
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    yield started
    started.kill()
    started.communicate()


def test_interrupted_with_nothing_in_hand(tmp_path: Path, endless: subprocess.Popen[bytes]) -> None:
    with (tmp_path / "cluster.yaml").open("w"):  # opens once the command waits for its text
        endless.send_signal(signal.SIGINT)
        out, err = endless.communicate(timeout=60)
    assert endless.returncode == 130 and out == b"" and err.decode().split("\n") == ["hapmoe: interrupted", ""]
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.yaml"]


def test_interrupted_with_a_plan_in_hand(tmp_path: Path) -> None:
    """Ctrl-C as soon as there is a plan: the search ends, and what it has is written."""
    code = (
        "import os, signal\nfrom hapmoe import cli\nfrom hapmoe.__main__ import main\n"
        "def show(self, settled, total, best_s, bound_s):\n"
        "    if best_s < float('inf'): os.kill(os.getpid(), signal.SIGINT)\n"
        "cli._progress.show = show\nmain()"
    )
    words = ["plan", str(EXAMPLES / "qwen3-30b-a3b.sh"), "--cluster", H100, "--json"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["search"]["status"] == "feasible" and 0 < document["search"]["gap"] < 1
    assert document == json.loads((tmp_path / "hapmoe-plan" / "plan.json").read_text())


def test_interrupted_on_a_terminal(tmp_path: Path) -> None:
    """A real Ctrl-C: the first line of progress that knows a step is waited for, then the signal sent."""
    command = ["plan", str(ROOT / "bench/cases/llama3-405b.sh"), "--cluster", str(ROOT / "bench/cases/16384-4.yaml")]
    ours, its = pty.openpty()
    with subprocess.Popen(
        [*HAPMOE, *command, "--json"], cwd=tmp_path, env=ENV, stdout=subprocess.PIPE, stderr=its, text=True
    ) as started:
        os.close(its)
        seen = b""
        while b"best step" not in seen:
            seen += os.read(ours, 4096)
        started.send_signal(signal.SIGINT)
        drain = threading.Thread(target=read_all, args=(ours,), daemon=True)
        drain.start()
        out, _ = started.communicate(timeout=120)
    assert started.returncode == 0, seen
    line = re.findall(r"\d[\d,]*/\d[\d,]* options, best step \S+ m?s, bound \S+ m?s", seen.decode())
    assert line, seen
    document = json.loads(out)
    assert document["search"]["status"] == "feasible" and 0 < document["search"]["gap"] < 1
    assert document["estimate"]["step_s"] * (1 - document["search"]["gap"]) == pytest.approx(
        document["estimate"]["lower_bound_s"]
    )


def read_all(terminal: int) -> None:
    """Whatever comes, until the other end is closed: what writes to a terminal must not wait for its reader."""
    with contextlib.suppress(OSError):
        while os.read(terminal, 4096):
            pass
