"""The JobSet by its schema, and its pods run as the controller would start them, with stand-ins inside."""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import builders as b
import msgspec
import pytest
import yaml
from dryrun import TRAINER, Sandbox

from hapmoe.job import Argument, JobSpec
from hapmoe.launch import target
from hapmoe.launch.options import JobOptions, KindOptions, LaunchOptions
from hapmoe.launch.write import write_files
from hapmoe.plan import Plan
from hapmoe.resolve import resolve

SCHEMA = yaml.safe_load((Path(__file__).parent / "schemas" / "jobset.yaml").read_text())
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
CLUSTER = b.cluster(
    b.pool("a100", devices_per_node=2), b.pool("mi300x", nodes=2, devices_per_node=1), links=(("a100", "mi300x"),)
)
MIXED = b.cluster(b.pool("a100", devices_per_node=2), b.pool("h800", nodes=2, devices_per_node=1))


def wrong(value: Any, schema: dict[str, Any], where: str = "") -> list[str]:
    """What breaks the schema; fields that it does not name do."""
    kind = schema.get("type")
    if kind and (not isinstance(value, TYPES[kind]) or (kind == "integer" and isinstance(value, bool))):
        return [f"{where} is {type(value).__name__}, not {kind}"]
    said = []
    if "equals" in schema and value != schema["equals"]:
        said.append(f"{where} is {value!r}")
    if "enum" in schema and value not in schema["enum"]:
        said.append(f"{where} is {value!r}, none of {schema['enum']}")
    if "minimum" in schema and value < schema["minimum"]:
        said.append(f"{where} is {value}")
    if "pattern" in schema and not re.fullmatch(schema["pattern"], value):
        said.append(f"{where} is {value!r}, not {schema['pattern']}")
    said += [f"{where}.{name} is missing" for name in schema.get("required", ()) if name not in value]
    if "properties" in schema or "values" in schema:
        for name, inner in value.items():
            below = schema.get("properties", {}).get(name) or schema.get("values")
            said += wrong(inner, below, f"{where}.{name}") if below else [f"{where}.{name} is not a field"]
    if "items" in schema:
        for index, item in enumerate(value):
            said += wrong(item, schema["items"], f"{where}[{index}]")
    return said


def made(job: JobSpec, cluster: b.Cluster, plan: Plan, options: LaunchOptions | None = None) -> dict[str, str]:
    plan = resolve(job, cluster, plan)
    return target("kubernetes")(job, cluster, plan, msgspec.json.encode(plan).decode(), options)


def plan_for(cluster: b.Cluster) -> Plan:
    return b.plan((2, 6), pools=tuple(pool.name for pool in cluster.pools), dp=2, ep=2)


OPTIONS = LaunchOptions(
    job=JobOptions(name="Mixtral 8x7B (run 3)", namespace="team", claim="shared", mount="/data/run/"),
    kinds={
        "a100": KindOptions(image="team/cuda:1", node_selector={"gpu": "a100"}),
        "h800": KindOptions(image="team/cuda:1", resource="nvidia.com/h800"),
        "mi300x": KindOptions(image="team/rocm:1"),
    },
)


@pytest.mark.parametrize("options", [None, OPTIONS])
@pytest.mark.parametrize("cluster", [MIXED, CLUSTER, b.cluster(b.pool("a" * 60, device=b.device("a100")))])
def test_schema(cluster: b.Cluster, options: LaunchOptions | None) -> None:
    plan = plan_for(cluster) if len(cluster.pools) > 1 else b.plan(pools=("a" * 60,), dp=8)
    text = made(b.job(), cluster, plan, options)["jobset.yaml"]
    document = yaml.safe_load(text)
    assert wrong(document, SCHEMA) == []
    name, spec = document["metadata"]["name"], document["spec"]
    for job in spec["replicatedJobs"]:
        # pkg/webhooks/jobset_webhook.go: the longest pod name with the controller's suffix is a label.
        longest = f"{name}-{job['name']}-0-{job['template']['spec']['completions'] - 1}-abcde"
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", longest) and len(longest) <= 63
    volumes = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert {v["name"] for v in volumes["volumes"]} == {m["name"] for m in volumes["containers"][0]["volumeMounts"]}


def test_the_schema_sees_mistakes() -> None:
    document = yaml.safe_load(made(b.job(), MIXED, plan_for(MIXED))["jobset.yaml"])
    spec = document["spec"]["replicatedJobs"][0]["template"]["spec"]
    spec["completionMode"] = "indexed"
    spec["template"]["spec"]["containers"][0]["env"][0]["value"] = 0
    spec["paralelism"] = 1
    assert len(wrong(document, SCHEMA)) == 3


def test_kinds_get_what_is_theirs() -> None:
    document = yaml.safe_load(made(b.job(), MIXED, plan_for(MIXED), OPTIONS)["jobset.yaml"])
    assert document["metadata"] == {"name": "mixtral-8x7b-run-3", "namespace": "team"}
    pods = [job["template"]["spec"]["template"]["spec"] for job in document["spec"]["replicatedJobs"]]
    assert [pod["containers"][0]["image"] for pod in pods] == ["team/cuda:1", "team/cuda:1"]
    assert [pod["containers"][0]["resources"]["limits"] for pod in pods] == [
        {"nvidia.com/gpu": 2},
        {"nvidia.com/h800": 1},
    ]
    assert pods[0]["nodeSelector"] == {"gpu": "a100"} and "nodeSelector" not in pods[1]
    amd = yaml.safe_load(made(b.job(), CLUSTER, plan_for(CLUSTER), OPTIONS)["jobset.yaml"])
    limits = amd["spec"]["replicatedJobs"][1]["template"]["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert limits == {"limits": {"amd.com/gpu": 1}}


def test_pods_become_the_plans_ranks(tmp_path: Path) -> None:
    """launch.sh with a stand-in kubectl; then every pod's command, with what the controller sets."""
    job = b.job(argv="--bf16 --save $(date)", env={"WANDB_API_KEY": Argument(text=None, source="WANDB_API_KEY")})
    options = LaunchOptions(
        job=JobOptions(claim="shared", mount=str(tmp_path / "claim")),
        kinds={name: KindOptions(image="i", env={"KIND": name}) for name in ("a100", "h800")},
    )
    work = tmp_path / "claim"
    (work / "seen").mkdir(parents=True)
    (work / "pretrain_gpt.py").write_text(TRAINER)
    folder = write_files(work / "hapmoe-plan", made(job, MIXED, plan_for(MIXED), options))
    sandbox = Sandbox(tmp_path)
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.write_text(f'#!/bin/sh\n{{ echo "--- # $*"; if [ "$3" = - ]; then cat; fi; }} >> {tmp_path}/applied\n')
    kubectl.chmod(0o755)
    env = {"PATH": f"{sandbox.root / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(sandbox.root / "lib")}
    env |= {"HAPMOE_SKIP_DEVICE_CHECK": "1", "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(tmp_path)}
    started = subprocess.run(
        [folder / "launch.sh"], env={**env, "WANDB_API_KEY": "s'3 \"cret"}, capture_output=True, text=True, check=False
    )
    assert started.returncode == 0, started.stderr
    secret, applied = (tmp_path / "applied").read_text().split("---")[1:]
    assert applied.split() == ["#", "apply", "-f", str(folder / "jobset.yaml")]
    data = yaml.safe_load(secret)["data"]
    values = {name: base64.b64decode(value).decode() for name, value in data.items()}
    assert "s'3 \"cret" in values.values() and len(values) == 2

    document = yaml.safe_load((folder / "jobset.yaml").read_text())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    pods = []
    for replicated in document["spec"]["replicatedJobs"]:
        spec = replicated["template"]["spec"]
        container = spec["template"]["spec"]["containers"][0]
        given = {entry["name"]: entry["value"] for entry in container["env"]}
        assert given.pop("MASTER_ADDR") == "small-a100-0-0.small"
        for index in range(spec["completions"]):
            own = {**env, **values, **given, "JOB_COMPLETION_INDEX": str(index), "MASTER_ADDR": "127.0.0.1"}
            own["MASTER_PORT"] = port
            pods.append(subprocess.Popen(container["command"], env=own, stderr=subprocess.PIPE, text=True))
    said = [pod.communicate(timeout=60)[1] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0, 0], said
    rows = {row["rank"]: row for row in (json.loads(path.read_text()) for path in (work / "seen").iterdir())}
    assert {rank: row["env"]["KIND"] for rank, row in sorted(rows.items())} == {
        0: "a100",
        1: "a100",
        2: "h800",
        3: "h800",
    }
    assert {row["env"]["WANDB_API_KEY"] for row in rows.values()} == {"s'3 \"cret"}
    assert len({row["argv"][row["argv"].index("--save") + 1] for row in rows.values()}) == 1
    deleted = subprocess.run([folder / "launch.sh", "--delete"], env=env, capture_output=True, text=True, check=False)
    assert deleted.returncode == 0 and "delete --ignore-not-found -f" in (tmp_path / "applied").read_text()


def test_placeholders_and_what_cannot_run_stop(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "plan", made(b.job(), MIXED, plan_for(MIXED)))
    done = subprocess.run([folder / "launch.sh"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "launch.sh: jobset.yaml still says CHANGE-ME/image-for-a100\n")
    blocked = write_files(tmp_path / "mixed", made(b.job(), CLUSTER, plan_for(CLUSTER), OPTIONS))
    done = subprocess.run([blocked / "launch.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "cannot join nccl and rccl" in done.stderr
