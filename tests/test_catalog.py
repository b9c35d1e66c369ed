"""The catalogue against published facts, and how names are read."""

from __future__ import annotations

from importlib import resources

import pytest
import yaml

from hapmoe.catalog import catalog_rows, find_device, load_catalog, render_devices, reported_as
from hapmoe.cluster import Device
from hapmoe.errors import InputError

NAMES = """
a100-40g-sxm a100-80g-sxm a100-80g-pcie a800-80g-sxm h100-80g-sxm h100-80g-pcie h800-80g-sxm h200-141g-sxm
h20-96g-sxm b200-180g-sxm gb200-186g mi250x-gcd-64g mi300x-192g mi325x-256g mi355x-288g ascend-910b ascend-910b-376t
ascend-910c v100-16g-sxm v100-32g-sxm l40s-48g rtx4090-24g rtx3090-24g t4-16g cpu""".split()  # noqa: SIM905

# Data sheets, as printed: dense TFLOP/s of the 16-bit tensor format, memory GB/s, NVLink or Infinity Fabric GB/s of
# BOTH directions, watts.
DATA_SHEETS = {
    "v100-32g-sxm": (125, 900, 300, 300),  # NVIDIA V100 data sheet, SXM2
    "a100-40g-sxm": (312, 1555, 600, 400),  # NVIDIA A100 40 GB data sheet
    "a100-80g-sxm": (312, 2039, 600, 400),  # NVIDIA A100 80 GB data sheet
    "a800-80g-sxm": (312, 2039, 400, 400),  # NVIDIA A800 data sheet
    "h100-80g-sxm": (1979 / 2, 3350, 900, 700),  # NVIDIA H100 data sheet, whose tensor figures are sparse
    "h800-80g-sxm": (1979 / 2, 3350, 400, 700),  # arXiv:2505.11432 Table 4 for the link
    "h200-141g-sxm": (1979 / 2, 4800, 900, 700),  # NVIDIA H200 data sheet, sparse as above
    "h20-96g-sxm": (148, 4000, 900, 400),  # arXiv:2505.11432 Table 4
    "b200-180g-sxm": (2250, 7700, 1800, 1000),  # NVIDIA Blackwell architecture technical brief
    "gb200-186g": (2500, 8000, 1800, 1200),  # NVIDIA GB200 NVL72 page, a 72nd of the rack
    "mi250x-gcd-64g": (383 / 2, 3276.8 / 2, 700, 560 / 2),  # AMD MI250X data sheet, half a package
    "mi300x-192g": (1307.4, 5300, 896, 750),  # AMD MI300X data sheet
    "mi325x-256g": (1307.4, 6000, 896, 1000),  # AMD MI325X data sheet
    "mi355x-288g": (2516.6, 8000, 1075.2, 1400),  # AMD MI355X data sheet
}
# Marketing GB of the parts; what a process gets is less, and never more than the parts' GiB.
SIZES = {"a100-40g-sxm": 40, "h100-80g-sxm": 80, "h200-141g-sxm": 141, "b200-180g-sxm": 192, "mi300x-192g": 192,
         "ascend-910b": 64, "ascend-910c": 64, "l40s-48g": 48, "t4-16g": 16, "mi250x-gcd-64g": 64}  # fmt: skip


def test_every_promised_name_exists_and_is_found_exactly() -> None:
    for name in NAMES:
        device, reading = find_device(name)
        assert device.name == name and reading is None


@pytest.mark.parametrize("name", DATA_SHEETS)
def test_figures_are_those_of_the_data_sheets(name: str) -> None:
    tflops, memory, link, watts = DATA_SHEETS[name]
    device = load_catalog()[name]
    assert device.peak_flop_per_s["fp16"] == pytest.approx(tflops * 1e12, rel=1e-3)
    assert device.memory_bytes_per_s == pytest.approx(memory * 1e9, rel=1e-3)
    assert 2 * device.scale_up_bytes_per_s == pytest.approx(link * 1e9, rel=1e-3)
    assert device.power_w == watts


@pytest.mark.parametrize("name", SIZES)
def test_memory_is_what_a_process_gets(name: str) -> None:
    size = load_catalog()[name].memory_bytes
    assert 0.9 * SIZES[name] * 2**30 < size <= SIZES[name] * 2**30


def test_export_limited_parts_differ_from_their_originals_in_the_link_only() -> None:
    catalog = load_catalog()
    for limited, original in (("a800-80g-sxm", "a100-80g-sxm"), ("h800-80g-sxm", "h100-80g-sxm")):
        a, b = catalog[limited], catalog[original]
        assert (a.peak_flop_per_s, a.memory_bytes) == (b.peak_flop_per_s, b.memory_bytes)
        assert a.scale_up_bytes_per_s < b.scale_up_bytes_per_s
        assert a.efficiency_note


def test_particular_shapes() -> None:
    catalog = load_catalog()
    gb200 = catalog["gb200-186g"]
    assert (gb200.scale_up_domain, gb200.devices_per_node) == (72, 4)  # NVL72, in trays of 4
    assert catalog["ascend-910c"].devices_per_node == 16  # 8 packages of 2 dies, a rank each: arXiv:2506.12708
    assert catalog["mi250x-gcd-64g"].devices_per_node == 8  # Frontier: 4 packages of 2 GCDs
    assert "bf16" not in catalog["v100-16g-sxm"].peak_flop_per_s  # Volta has no bf16
    assert "fp8" not in catalog["a100-80g-sxm"].peak_flop_per_s  # nor Ampere fp8
    assert catalog["h20-96g-sxm"].peak_flop_per_s["bf16"] < catalog["a100-80g-sxm"].peak_flop_per_s["bf16"]


@pytest.mark.parametrize("device", load_catalog().values(), ids=lambda device: device.name)
def test_every_number_has_a_source_and_dense_proportions(device: Device) -> None:
    (shown,) = render_devices([device.name])
    for figure in shown["figures"]:
        assert figure["source"], f"{device.name}: {figure['field']}"
        assert figure["value"] > 0
    peaks = device.peak_flop_per_s
    if device.vendor in ("nvidia", "amd"):
        # A sparse figure that slipped in would show as a factor of 2 between two formats.
        assert peaks.get("bf16", peaks["fp16"]) == peaks["fp16"]
        assert peaks.get("fp8", 2 * peaks["fp16"]) == pytest.approx(2 * peaks["fp16"], rel=0.02)
    assert device.scale_up_domain >= device.devices_per_node
    assert device.efficiency and (device.runtime_names or device.vendor == "cpu")


@pytest.mark.parametrize(
    ("text", "name"),
    [("h200", "h200-141g-sxm"), ("h20", "h20-96g-sxm"), ("mi300x", "mi300x-192g"), ("l40s", "l40s-48g"),
     ("gb200", "gb200-186g"), ("b200", "b200-180g-sxm"), ("T4", "t4-16g"), ("h100_80g_pcie", "h100-80g-pcie"),
     ("ascend_910c", "ascend-910c"), ("H800", "h800-80g-sxm"), ("mi250x", "mi250x-gcd-64g")],
)  # fmt: skip
def test_short_names(text: str, name: str) -> None:
    device, reading = find_device(text)
    assert device.name == name
    assert reading is None or reading == f"'{text}' read as {name}"


@pytest.mark.parametrize(
    ("text", "told"),
    [("h100", "h100-80g-sxm, h100-80g-pcie or"), ("v100", "v100-16g-sxm or v100-32g-sxm"), ("ascend", "ascend-910c"),
     ("910b", "did you mean ascend-910b"), ("h100-80g-smx", "h100-80g-sxm"), ("h2", "hapmoe devices"), ("", "name"),
     (None, "name"), (100, "name"), (["h100"], "name")],
)  # fmt: skip
def test_ambiguous_and_unknown_names(text: object, told: str) -> None:
    with pytest.raises(InputError) as caught:
        find_device(text, "cluster.yaml: pools[0].device")
    assert told in str(caught.value) and str(caught.value).startswith("cluster.yaml: pools[0].device: ")


@pytest.mark.parametrize(
    ("reported", "name"),
    [("NVIDIA H100 80GB HBM3", "h100-80g-sxm"), ("NVIDIA H100 PCIe", "h100-80g-pcie"), ("NVIDIA H200", "h200-141g-sxm"),
     ("NVIDIA H20", "h20-96g-sxm"), ("NVIDIA A100-SXM4-80GB", "a100-80g-sxm"),
     ("NVIDIA A100 80GB PCIe", "a100-80g-pcie"),
     ("NVIDIA B200", "b200-180g-sxm"), ("NVIDIA GB200", "gb200-186g"), ("Tesla V100-SXM2-16GB", "v100-16g-sxm"),
     ("NVIDIA L4", "l4-24g"), ("NVIDIA L40S", "l40s-48g"), ("AMD Instinct MI300X VF", "mi300x-192g"),
     ("Ascend910B3", "ascend-910b"), ("Ascend910B2", "ascend-910b-376t"), ("Ascend910_9392", "ascend-910c")],
)  # fmt: skip
def test_names_that_drivers_report(reported: str, name: str) -> None:
    assert [device.name for device in reported_as(reported)] == [name]


def test_an_unknown_driver_name_is_no_kind() -> None:
    assert reported_as("Radeon RX 580") == ()


def test_every_kind_has_efficiency_curves() -> None:
    text = resources.files("hapmoe").joinpath("data/efficiency.yaml").read_text(encoding="utf-8")
    rows = {key for section in yaml.safe_load(text).values() if isinstance(section, dict) for key in section}
    assert {device.efficiency for device in load_catalog().values()} <= rows


def test_rows_of_the_table_are_text_and_complete() -> None:
    rows = catalog_rows()
    assert [row["name"] for row in rows] == list(load_catalog())
    h100 = next(row for row in rows if row["name"] == "h100-80g-sxm")
    assert h100["bf16"] == "989.5 TFLOP/s" and h100["memory bandwidth"] == "3.35 TB/s"
