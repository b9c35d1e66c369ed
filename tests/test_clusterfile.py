"""cluster.yaml: what is accepted, how it is read, and that every mistake is one line."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hapmoe.catalog import load_catalog
from hapmoe.cluster import Cluster
from hapmoe.clusterfile import cluster_to_dict, load_cluster
from hapmoe.errors import InputError

EXAMPLES = Path(__file__).parents[1] / "examples" / "clusters"

DOCUMENTED = """
pools:
  - name: h800
    device: h800-80g-sxm
    nodes: 2
    devices_per_node: 8
    hosts: [h800-0, h800-1]
    memory_reserve: 4 GiB
    network: {nics_per_node: 8, bandwidth: 400 Gb/s, latency: 4 us}
  - {name: ascend, device: ascend-910b, nodes: 2}
links:
  - {between: [h800, ascend], bandwidth: 100 Gb/s, latency: 20 us, transport: gloo}
"""


def one_pool(**fields: Any) -> dict[str, Any]:
    return {"pools": [{"name": "a", "device": "h100-80g-sxm", "nodes": 2, **fields}]}


def write(folder: Path, text: str | bytes) -> Path:
    file = folder / "cluster.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def refusal(source: Any) -> str:
    with pytest.raises(InputError) as caught:
        load_cluster(source)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    return message


# ---- accepted --------------------------------------------------------------------------------------------------------


def test_the_documented_file(tmp_path: Path) -> None:
    cluster = load_cluster(write(tmp_path, DOCUMENTED))
    h800, ascend = cluster.pools
    assert (h800.num_devices, h800.hosts, h800.memory_reserve_bytes) == (16, ("h800-0", "h800-1"), 4 * 2**30)
    assert h800.network.node_bytes_per_s == 400e9  # 8 NICs of 400 Gb/s are 400 GB/s
    assert h800.network.source == "cluster file"
    assert ascend.devices_per_node == 8 and "ASSUMED" in ascend.network.source
    link = cluster.link("ascend", "h800")
    assert link and (link.bytes_per_s, link.transport) == (12.5e9, "gloo")
    assert link.latency_s == pytest.approx(20e-6)
    assert cluster.readings == () and len(cluster.sha256) == 64


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_examples_load_and_their_pools_can_meet(file: Path) -> None:
    text = file.read_text()
    cluster = load_cluster(file)
    assert text.startswith("# ") and len(text.splitlines()) <= 12
    assert not cluster.readings
    for first, second in zip(cluster.pools, cluster.pools[1:], strict=False):
        assert cluster.link(first.name, second.name)
    if file.stem[:2].isdigit():  # the paper's clusters carry their size in their name
        assert cluster.num_devices == int(file.stem[:2])


def test_all_clusters_of_the_paper_are_there() -> None:
    names = {file.stem for file in EXAMPLES.glob("*.yaml")}
    assert names >= {f"16-{i}-h" for i in (1, 2, 3)} | {f"{n}-{i}" for n in (16, 24, 32) for i in (1, 2, 3)}


def test_hosts_alone_count_the_nodes_and_nics_follow_the_devices() -> None:
    fields = {"name": "a", "device": "h100-80g-sxm", "hosts": ["n0", "n1", "n2"], "devices_per_node": 4}
    (pool,) = load_cluster({"pools": [fields]}).pools
    assert (pool.nodes, pool.num_devices, pool.network.nics_per_node) == (3, 12, 4)


def test_readings_say_how_ambiguous_input_was_read() -> None:
    cluster = load_cluster(one_pool(device="h200", network={"bandwidth": "400 GB/s"}, devices_per_node=3))
    assert cluster.pools[0].network.nic_bytes_per_s == 400e9
    assert cluster.readings == (
        "'h200' read as h200-141g-sxm",
        "pools[0].devices_per_node 3: the usual node of h200-141g-sxm has 8",
        "pools[0].network.bandwidth 400 GB/s read as bytes (3,200 Gb/s per NIC)",
    )
    assert cluster.pools[0].network.source == (
        "cluster file; ASSUMED: nics_per_node, latency of the usual node of h200-141g-sxm"
    )


def test_a_device_changed_in_place() -> None:
    # H100 NVL: an H100 PCIe with 94 GB at 3.9 TB/s (NVIDIA H100 data sheet)
    peak = {"bf16": "835.5 TFLOP/s"}
    spec = {"like": "h100-80g-pcie", "memory": "94 GB", "memory_bandwidth": "3.9 TB/s", "peak": peak}
    device = load_cluster(one_pool(device=spec)).pools[0].device
    assert (device.name, device.memory_bytes) == ("h100-80g-pcie-custom", 94 * 10**9)
    assert device.peak_flop_per_s["bf16"] == 835.5e12
    assert device.peak_flop_per_s["fp8"] == 1513e12  # kept
    assert device.sources["memory_bytes"] == "cluster file" and "NVIDIA" in device.sources["power_w"]


def test_a_device_defined_in_full() -> None:
    spec = {
        "name": "c500",
        "vendor": "MetaX",
        "ccl": "flagcx",
        "memory": "64 GiB",
        "memory_bandwidth": "1.8 TB/s",
        "peak": {"bf16": "240 TFLOP/s"},
        "scale_up": {"bandwidth": "100 GB/s"},
        "efficiency": "a100",
    }
    network = {"nics_per_node": 4, "bandwidth": "200 Gb/s", "kind": "EFA"}
    cluster = load_cluster(one_pool(device=spec, network=network))
    assert cluster.pools[0].network.kind == "efa"
    assert load_cluster(cluster_to_dict(cluster)).pools[0].network.kind == "efa"
    device = cluster.pools[0].device
    assert (device.name, device.vendor, device.scale_up_domain, device.nics_per_node) == ("c500", "metax", 8, 4)
    assert device.sources["scale_up_latency_s"] == "ASSUMED" and not cluster.readings
    del spec["efficiency"], spec["ccl"]
    assert "ccl" in refusal(one_pool(device=spec, network=network))
    assert "lacks network.nics_per_node, network.bandwidth" in refusal(one_pool(device=spec | {"ccl": "gloo"}))
    borrowed = load_cluster(one_pool(device=spec | {"ccl": "gloo"}, network=network))
    assert borrowed.readings == ("c500 takes the efficiency curves of h100 (ASSUMED)",)


def test_mixed_kinds_in_a_node_name_the_same_hosts() -> None:
    pools = [
        {"name": "a", "device": "a100-80g-sxm", "hosts": ["n0", "n1"], "devices_per_node": 4},
        {"name": "b", "device": "mi300x", "hosts": ["n0", "n1"], "devices_per_node": 4},
    ]
    assert load_cluster({"pools": pools}).num_devices == 16
    pools[1]["hosts"] = ["n1", "n2"]
    assert "same hosts" in refusal({"pools": pools})


def test_a_link_states_what_it_assumes() -> None:
    pools = [{"name": n, "device": d, "nodes": 1} for n, d in (("a", "a100-80g-sxm"), ("h", "h800"), ("m", "mi300x"))]
    links = [{"between": ["a", "h"], "bandwidth": "1600 Gb/s"}, {"between": ["h", "m"], "bandwidth": "100 Gb/s"}]
    same, mixed = load_cluster({"pools": pools, "links": links}).links
    assert (same.transport, mixed.transport) == ("nccl", "gloo")
    assert same.source == mixed.source == "cluster file; ASSUMED: latency, transport"
    links[1]["transport"] = "nccl"
    (reading,) = load_cluster({"pools": pools, "links": links}).readings[2:]
    assert "links[1].transport nccl does not join h (nccl) and m (rccl)" in reading


def test_the_hash_is_of_the_meaning(tmp_path: Path) -> None:
    def digest(text: str) -> str:
        return load_cluster(write(tmp_path, text)).sha256

    same = DOCUMENTED.replace("400 Gb/s", "50 GB/s").replace("4 GiB", "4096 MiB").replace("h800-80g-sxm", "H800")
    assert digest(DOCUMENTED) == digest("# a comment\n" + same)
    assert digest(DOCUMENTED) != digest(DOCUMENTED.replace("latency: 20 us", "latency: 21 us"))


# ---- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"nodes": 0}, "pools[0].nodes: 0 is outside 1"),
        ({"nodes": -2}, "pools[0].nodes: -2 is outside"),
        ({"nodes": 10**30}, "more than 20 digits"),
        ({"nodes": True}, "pools[0].nodes: True is not a whole number"),
        ({"nodes": "2"}, "pools[0].nodes: '2' is not a whole number"),
        ({"nodes": 2.0}, "not a whole number"),
        ({"devices_per_node": 0}, "pools[0].devices_per_node"),
        ({"devise": "h100"}, "did you mean device?"),
        ({1: 2}, "unknown key 1"),
        ({"name": "a b"}, "cannot name a pool"),
        ({"name": 7}, "pools[0].name: 7 is not text"),
        ({"hosts": ["n0"]}, "pools[0].hosts: 1 hosts for 2 nodes"),
        ({"hosts": ["n0", "n0"]}, "pools[0].hosts[1]: n0 is listed twice"),
        ({"hosts": ["n0", "$(reboot)"]}, "not a host name"),
        ({"hosts": "n0,n1"}, "is not a list"),
        ({"memory_reserve": 4}, "pools[0].memory_reserve: 4 has no unit"),
        ({"memory_reserve": "4"}, "has no unit"),
        ({"memory_reserve": "90 GB"}, "leaves nothing of 79.1 GiB"),
        ({"memory_reserve": "1e999 GB"}, "more than any number"),
        ({"network": {"bandwidth": 400}}, "pools[0].network.bandwidth: 400 has no unit"),
        ({"network": {"bandwidth": "400 GB"}}, "Gb/s are bits, GB/s are bytes"),
        ({"network": {"bandwidth": "400 Tb/s"}}, "reads as 400,000 Gb/s, which is outside 1 Gb/s to 3,200 Gb/s"),
        ({"network": {"bandwidth": "400 Kb/s"}}, "outside 1 Gb/s"),
        ({"network": {"bandwith": "400 Gb/s"}}, "did you mean bandwidth?"),
        ({"network": {"latency": "4 s"}}, "reads as 4e+06 us"),
        ({"network": {"kind": "infiniband"}}, "is not one of efa, omni-path"),
        ({"network": {"latency": "4"}}, "has no unit"),
        ({"network": {"nics_per_node": 0}}, "nics_per_node: 0 is outside"),
        ({"network": "fast"}, "is not a mapping"),
        ({"price_per_device_hour": "2 USD"}, "is not a number"),
        ({"price_per_device_hour": float("nan")}, "outside 0"),
        ({"power": 700}, "'700 W'".replace("'", '"')),
        ({"device": "h100"}, "h100-80g-sxm, h100-80g-pcie or"),
        ({"device": "h900"}, "`hapmoe devices` lists all"),
        ({"device": {"like": "h100"}}, "pools[0].device.like"),
        ({"device": {"like": "h200", "memory": 80}}, "pools[0].device.memory: 80 has no unit"),
        ({"device": {"like": "h200", "memory": "80 TiB"}}, "outside 0.25 GiB to 4096 GiB"),
        ({"device": {"like": "h200", "peak": {"bf61": "1 TFLOP/s"}}}, "did you mean bf16?"),
        ({"device": {"like": "h200", "peak": {"bf16": "989 GB/s"}}}, "not a compute rate"),
        ({"device": {"like": "h200", "efficiency": "h10"}}, "did you mean h100?"),
        ({"device": {"like": "h200", "name": "h100-80g-sxm"}}, "is a kind of the catalogue"),
        ({"device": {"memory": "80 GiB"}}, "lacks vendor, memory_bandwidth, peak, scale_up.bandwidth"),
        ({"device": {"like": "h200", "vendor": ["x"]}}, "is not text"),
    ],
)
def test_wrong_pools(fields: dict[Any, Any], told: str) -> None:
    message = refusal(one_pool(**fields) if all(isinstance(key, str) for key in fields) else _keyed(fields))
    assert told in message and message.startswith("cluster: pools[0]")


def _keyed(fields: dict[Any, Any]) -> dict[str, Any]:
    return {"pools": [{"name": "a", "device": "h200", "nodes": 1} | fields]}


@pytest.mark.parametrize(
    ("link", "told"),
    [
        ({"between": ["h800", "ascent"]}, "did you mean ascend?"),
        ({"between": ["h800", "h800"]}, "joins h800 with itself"),
        ({"between": ["h800"]}, "1 pools, not two"),
        ({"between": "h800-ascend"}, "is not a list"),
        ({"bandwidth": "0 Gb/s"}, "not above zero"),
        ({"bandwidth": "100"}, "has no unit"),
        ({"transport": "mpi"}, "'mpi' is not one of nccl, rccl, hccl, oneccl, flagcx, gloo"),
        ({"speed": 1}, "unknown key 'speed'"),
    ],
)
def test_wrong_links(link: dict[str, Any], told: str) -> None:
    content = yaml.safe_load(DOCUMENTED)
    content["links"][0].update(link)
    message = refusal(content)
    assert told in message and message.startswith("cluster: links[0]")


def test_a_pair_is_joined_once_and_pools_are_named_once() -> None:
    content = yaml.safe_load(DOCUMENTED)
    content["links"].append({"between": ["ascend", "h800"], "bandwidth": "1 Gb/s"})
    assert "links[1].between: ascend and h800 are joined twice" in refusal(content)
    content = yaml.safe_load(DOCUMENTED)
    content["pools"][1]["name"] = "h800"
    assert "pools[1].name: two pools are called h800" in refusal(content)


def test_one_device_name_means_one_device() -> None:
    sizes = (("a", "90 GB"), ("b", "91 GB"))
    pools = [{"name": name, "nodes": 1, "device": {"like": "h200", "memory": size}} for name, size in sizes]
    assert "define h200-141g-sxm-custom differently" in refusal({"pools": pools})


BOMB = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("- a\n- b\n", "a list of 2 at the top"),
        ("just words", "'just words' at the top"),
        ("pools: []", "no pools"),
        ("links: []", "no pools"),
        ("pools:\n  - {name: a\n", "line "),
        ("pools:\n\t- a\n", "line 2, column 1: while scanning for the next token, found character that cannot start"),
        ("pools: 1\npools: 2\n", "line 2, column 1: the key 'pools' is given twice"),
        ("pools:\n  - {name: a, nodes: 1, nodes: 2}\n", "line 2, column 25: the key 'nodes' is given twice"),
        (BOMB, "more than 16 aliases"),
        ("[" * 30 + "]" * 30, "nested deeper than 20"),
        ("[" * 5000, "nest"),
        ("a: 1\n--- \nb: 2\n", "single document"),
        ("pools: !!python/object/apply:os.system ['true']\n", "line 1"),
        ("pools: *nowhere\n", "line 1, column 8"),
        ("pools: 2024-99-99\n", "cannot be read"),
        ("? [a]\n: 1\n", "unhashable"),
        (b"\x7fELF\x02\x01\x00\x00\xff\xfe", "is not text"),
        (b"pools: \x00\n", "is not YAML text"),
        ("pools: &p [*p]\n", "is not a mapping"),
        ("x" * (2**20 + 1), "more than the 1,048,576"),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_files_that_are_not_clusters(tmp_path: Path, text: str | bytes, told: str) -> None:
    file = write(tmp_path, text)
    message = refusal(file)
    assert told in message and message.startswith(str(file))


def test_paths_that_are_not_files(tmp_path: Path) -> None:
    assert "is a directory" in refusal(tmp_path)
    assert "no such file" in refusal(tmp_path / "missing.yaml")
    assert "not a file name" in refusal("a\0b")
    assert "not a file name" in refusal(DOCUMENTED)
    assert "cannot be read" in refusal("x" * 5000)


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    assert load_cluster(write(tmp_path, b"\xef\xbb\xbf" + DOCUMENTED.encode())).num_devices == 32


# ---- random ----------------------------------------------------------------------------------------------------------

WORDS = st.sampled_from(
    ["pools", "links", "name", "device", "nodes", "hosts", "network", "bandwidth", "between", "like", "peak", "memory",
     "h200", "a", "b", "400 Gb/s", "4 us", "80 GiB", "1e400 GB", "gloo", "", "0 Gb/s", "\u0661 us", "nan us",
     "scale_up"]
)  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=8) | st.binary(max_size=3)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | SCALARS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(VALUES)
def test_random_content_is_refused_in_one_line(content: Any) -> None:
    try:
        load_cluster(content if isinstance(content, dict) else {"pools": content})
    except InputError as error:
        assert len(str(error)) < 600


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_good_file_with_one_random_value_loads_or_is_refused(data: st.DataObject) -> None:
    content = copy.deepcopy(yaml.safe_load(DOCUMENTED))
    content["pools"][1]["device"] = {"like": "ascend-910b", "peak": {"bf16": "376 TFLOP/s"}, "scale_up": {"domain": 8}}
    holder: Any = content
    while True:
        key = data.draw(st.sampled_from(list(holder) if isinstance(holder, dict) else list(range(len(holder)))))
        if not isinstance(holder[key], dict | list) or not holder[key] or data.draw(st.booleans()):
            break
        holder = holder[key]
    holder[key] = data.draw(VALUES)
    with contextlib.suppress(InputError):
        assert isinstance(load_cluster(content), Cluster)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet="pols: {}[]-\n\t'\"&*!|>%@a,#0\x85\u2028", max_size=40) | st.text(max_size=30))
def test_random_text_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "random.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    message = refusal(file)
    assert message.startswith(str(file))


@st.composite
def clusters(draw: st.DrawFn) -> dict[str, Any]:
    kinds = list(load_catalog())
    count = draw(st.integers(1, 4))
    pools = []
    for i in range(count):
        kind = draw(st.sampled_from(kinds))
        pool: dict[str, Any] = {"name": f"p{i}", "device": kind, "nodes": draw(st.integers(1, 500))}
        if draw(st.booleans()):
            pool["devices_per_node"] = draw(st.integers(1, 16))
        if draw(st.booleans()):
            pool["device"] = {"like": kind, "name": f"kind{i}", "memory": f"{draw(st.integers(2**30, 2**41))} B",
                              "peak": {"bf16": f"{draw(st.floats(1, 5000))!r} TFLOP/s"}}  # fmt: skip
        if draw(st.booleans()):
            bandwidth, latency = draw(st.floats(1, 3200)), draw(st.floats(1, 99))
            pool["network"] = {"bandwidth": f"{bandwidth!r} Gb/s", "latency": f"{latency!r} us"}
        if draw(st.booleans()):
            pool["power"] = f"{draw(st.integers(10, 2000))} W"
            pool["price_per_device_hour"] = draw(st.floats(0, 50))
        if draw(st.booleans()):
            pool["memory_reserve"] = f"{draw(st.integers(0, 900))} MiB"
        pools.append(pool)
    links = [
        {"between": [f"p{i}", f"p{i + 1}"], "bandwidth": f"{draw(st.floats(0.1, 25600))!r} Gb/s"}
        for i in range(count - 1)
    ]
    return {"pools": pools, "links": links}


@settings(max_examples=100, deadline=None)
@given(clusters())
def test_written_and_read_again_is_the_same_cluster(content: dict[str, Any]) -> None:
    cluster = load_cluster(content)
    again = load_cluster(yaml.safe_load(yaml.safe_dump(cluster_to_dict(cluster))))
    assert again.sha256 == cluster.sha256
    assert cluster_to_dict(again) == cluster_to_dict(cluster)
