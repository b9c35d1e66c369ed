"""``hapmoe discover`` with stand-in tools that answer in the formats of the vendors, Slurm and Kubernetes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from hapmoe.cli import cli
from hapmoe.clusterfile import load_cluster
from hapmoe.discovery import sources

NVIDIA = "NVIDIA H100 80GB HBM3, 81559\n" * 8
AMD_6 = json.dumps(
    [
        {
            "gpu": gpu,
            "asic": {"market_name": "AMD Instinct MI300X", "vendor_id": "0x1002", "device_id": "0x74a1"},
            "vram": {"type": "HBM", "vendor": "HYNIX", "size": {"value": 196592, "unit": "MB"}},
        }
        for gpu in range(8)
    ]
)
AMD_7 = json.dumps({"gpu_data": json.loads(AMD_6)})
ROCM = json.dumps(
    {
        **{
            f"card{gpu}": {
                "VRAM Total Memory (B)": "68702699520",
                "VRAM Total Used Memory (B)": "10960896",
                "Card Series": "AMD INSTINCT MI250X",
                "Card Model": "0x740c",
            }
            for gpu in range(8)
        },
        "system": {"Driver version": "6.7.0"},
    }
)
_NPU = "\t{:<31}{:<31}{:<31}{}\n"
ASCEND = _NPU.format("NPU ID", "Chip ID", "Chip Logic ID", "Chip Name") + "".join(
    _NPU.format(npu, 0, npu, "Ascend 910B3") + _NPU.format(npu, 1, "-", "Mcu") for npu in range(8)
)
SINFO = """gpu-01|gpu:h200:8(S:0-1)|ib,h200|idle
gpu-01|gpu:h200:8(S:0-1)|ib,h200|idle
gpu-02|gpu:h200:8(S:0-1)|ib,h200|mixed
gpu-03|gpu:h200:8(S:0-1)|ib,h200|drained*
gpu-04|gpu:nvidia_a100-sxm4-40gb:4(S:0,1),shard:8|ib|allocated
gpu-05|gpu:8|ib,mi325x|idle
gpu-06|gpu:a100:4|ib|idle
gpu-07|gpu:4|ib|idle
cpu-01|(null)|(null)|idle
"""


def node(name: str, resource: str, count: int, labels: dict[str, str], **spec: object) -> dict[str, object]:
    ready = spec.pop("ready", "True")
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}},
        "spec": spec,
        "status": {
            "allocatable": {"cpu": "96", resource: str(count)},
            "conditions": [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": ready}],
        },
    }


A100 = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB", "nvidia.com/gpu.memory": "81920"}
H100 = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.memory": "81559"}
KUBERNETES = {
    "kind": "List",
    "items": [
        node("k-0", "nvidia.com/gpu", 8, A100),
        node("k-1", "nvidia.com/gpu", 8, A100),
        node("k-2", "nvidia.com/gpu", 8, H100),
        node("k-3", "nvidia.com/gpu", 8, H100, unschedulable=True),
        node("k-4", "nvidia.com/gpu", 8, H100, ready="False"),
        node("k-5", "amd.com/gpu", 8, {"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM"}),
        node("k-6", "huawei.com/Ascend910", 8, {"node.kubernetes.io/npu.chip.name": "910B4"}),
        node("k-7", "huawei.com/Ascend910", 8, {"accelerator": "huawei-Ascend910"}),
        node("k-8", "example.com/other", 8, {}),
    ],
}


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path, in which the tools are that a test puts there, and no others."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sources, "INFINIBAND", tmp_path / "infiniband")
    monkeypatch.setattr(sources.socket, "gethostname", lambda: "here.example.org")
    return tmp_path / "bin"


def answers(tools: Path, name: str, text: str, code: int = 0) -> None:
    (tools / f"{name}.txt").write_text(text)
    (tools / name).write_text(f"#!/bin/sh\n/bin/cat {tools}/{name}.txt\nexit {code}\n")
    (tools / name).chmod(0o755)


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["discover", *words], standalone_mode=False)
    assert done.exception is None, done.exception
    return done.return_value, done.output


@pytest.mark.parametrize(
    ("tool", "text", "kind", "memory"),
    [
        ("nvidia-smi", NVIDIA, "h100-80g-sxm", 80),
        ("amd-smi", AMD_6, "mi300x-192g", 192),
        ("amd-smi", AMD_7, "mi300x-192g", 192),
        ("rocm-smi", ROCM, "mi250x-gcd-64g", 64),
        ("npu-smi", ASCEND, "ascend-910b", 64),
    ],
)
def test_this_node_by_its_vendors_tool(tools: Path, tool: str, text: str, kind: str, memory: int) -> None:
    answers(tools, tool, text)
    code, out = run()
    cluster = load_cluster(yaml.safe_load(out))
    (pool,) = cluster.pools
    assert code == 0 and (pool.device.name, pool.nodes, pool.devices_per_node, pool.hosts) == (kind, 1, 8, ("here",))
    assert "network: not known" in out and cluster.num_devices == 8
    assert pool.device.memory_bytes / 2**30 == pytest.approx(memory, rel=0.1)


def test_active_ports_are_the_network(tools: Path, tmp_path: Path) -> None:
    answers(tools, "nvidia-smi", NVIDIA)
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "4: ACTIVE"), ("mlx5_2", "1: DOWN")):
        port = tmp_path / "infiniband" / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    _, out = run("--from", "here")
    network = load_cluster(yaml.safe_load(out)).pools[0].network
    assert (network.nics_per_node, network.nic_bytes_per_s) == (2, 50e9)  # 400 Gb/s are 50 GB/s
    (tmp_path / "infiniband" / "mlx5_1" / "ports" / "1" / "rate").write_text("100 Gb/sec (4X EDR)\n")
    assert "network: not known" in run("--from", "here")[1]  # two rates: no one figure is true


def test_slurm(tools: Path) -> None:
    answers(tools, "sinfo", SINFO)
    answers(tools, "nvidia-smi", NVIDIA)  # Slurm is asked first
    code, out = run()
    pools = {
        pool.name: (pool.device.name, pool.devices_per_node, pool.hosts)
        for pool in load_cluster(yaml.safe_load(out)).pools
    }
    assert code == 0 and pools == {
        "h200": ("h200-141g-sxm", 8, ("gpu-01", "gpu-02")),
        "a100": ("a100-40g-sxm", 4, ("gpu-04",)),
        "mi325x": ("mi325x-256g", 8, ("gpu-05",)),
    }
    assert "# left out: gpu-03 (drained*)\n" in out
    assert "# NOT HERE: 4 devices on each of gpu-06: 'a100' may be a100-40g-sxm or a100-80g-sxm or a100-80g-pcie" in out
    assert "# NOT HERE: 4 devices on each of gpu-07: 'ib' is no kind of the catalogue" in out
    assert "those of different vendors may not be neighbours" in out and "transport: gloo" in out


def test_kubernetes(tools: Path) -> None:
    answers(tools, "kubectl", json.dumps(KUBERNETES))
    code, out = run("--json")
    document = json.loads(out)
    assert code == 0 and document["source"] == "Kubernetes (kubectl get nodes)"
    assert {(pool["device"], *pool["hosts"]) for pool in document["pools"]} == {
        ("a100-80g-sxm", "k-0", "k-1"),
        ("h100-80g-sxm", "k-2"),
        ("mi300x-192g", "k-5"),
        ("ascend-910b4-32g", "k-6"),
    }
    assert document["unknown"] == [
        "8 devices on each of k-7: 'huawei-Ascend910' is no kind of the catalogue: define it in the file "
        "(docs/cluster-file.md)"
    ]
    assert document["remarks"][0] == "left out (not ready, or not to be scheduled on): k-3, k-4"


def test_two_kinds_in_one_node_share_their_hosts(tools: Path) -> None:
    answers(tools, "sinfo", "n1|gpu:h20:4,gpu:l40s:4|x|idle\nn2|gpu:h20:4|x|idle\nn3|gpu:h20:4,gpu:l40s:4|x|idle\n")
    cluster = load_cluster(yaml.safe_load(run()[1]))
    assert {pool.name: pool.hosts for pool in cluster.pools} == {
        "h20": ("n1", "n3"),
        "l40s": ("n1", "n3"),
        "h20-n1": ("n2",),
    }


def test_nothing_and_nonsense(tools: Path, tmp_path: Path) -> None:
    code, out = run()
    assert code == 1 and out.splitlines() == [
        "Slurm: no sinfo here, or no answer from it",
        "Kubernetes: no kubectl here, or no answer from its cluster",
        "this node: none of nvidia-smi, amd-smi, rocm-smi and npu-smi names a device here",
    ]
    for name in ("sinfo", "kubectl", "nvidia-smi", "amd-smi", "rocm-smi", "npu-smi"):
        answers(tools, name, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n{[|||", 9)
    assert run()[0] == 1
    for name in ("sinfo", "kubectl", "amd-smi", "rocm-smi", "npu-smi"):
        answers(tools, name, '{"items": 1} || gpu:x')
    assert run()[0] == 1
    with pytest.raises(Exception, match="no source 'cloud'"):
        run("--from", "cloud")


def test_a_file_is_never_overwritten(tools: Path, tmp_path: Path) -> None:
    answers(tools, "nvidia-smi", NVIDIA)
    out = tmp_path / "cluster.yaml"
    assert run("--out", os.fspath(out))[0] == 0 and load_cluster(out).num_devices == 8
    with pytest.raises(Exception, match="exists already"):
        run("--out", os.fspath(out))
