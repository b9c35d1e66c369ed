"""Kernel times against published benchmarks, and the behaviour of the curves."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest
from shapes_of import DEEPSEEK_V3, LLAMA2_7B, MIXTRAL_8X7B, job_of, options_of, pool_of

from hapmoe.catalog import find_device, load_catalog
from hapmoe.efficiency import attention_seconds, efficiency_of, gemm_seconds
from hapmoe.job import JobSpec
from hapmoe.pricing import explain, price


def _tflops(device: str, m: float, n: float, k: float, precision: str = "bf16") -> float:
    """Rate of a kernel benchmark: without what a whole training step loses (sustained)."""
    efficiency = efficiency_of(find_device(device)[0])
    seconds, _ = gemm_seconds(efficiency, np.array([m]), np.array([n]), np.array([k]), precision=precision)
    seconds = seconds * efficiency.sustained.get(precision, efficiency.sustained["bf16"])
    return float(2 * m * n * k / (seconds[0] + efficiency.gemm["bf16"].launch_s) / 1e12)


@pytest.mark.parametrize(
    ("device", "shape", "precision", "published"),
    [
        # aiconfigurator@095f58a5 gemm_perf (torch), Azure AI-benchmarking-guide (cuBLASLt)
        ("h200-141g-sxm", (2048, 4096, 4096), "bf16", 795.8),
        ("b200-180g-sxm", (8192, 8192, 8192), "bf16", 1500),
        ("h100-80g-sxm", (8192, 8192, 8192), "bf16", 760),
        ("a100-80g-sxm", (8192, 8192, 8192), "bf16", 255),
        ("h100-80g-sxm", (8192, 8192, 8192), "fp8", 1250),
        ("mi300x-192g", (8192, 8192, 8192), "bf16", 668),  # ml-engineering: maximum achievable 668
    ],
)
def test_gemm_rates(device: str, shape: tuple[int, int, int], precision: str, published: float) -> None:
    assert _tflops(device, *shape, precision) == pytest.approx(published, rel=0.15)


def test_small_gemms_are_bound_by_memory_or_launch() -> None:
    assert _tflops("h100-80g-sxm", 16, 4096, 4096) < 0.1 * _tflops("h100-80g-sxm", 8192, 4096, 4096)


def test_more_work_never_takes_less_time() -> None:
    efficiency = efficiency_of(find_device("h100-80g-sxm")[0])
    sizes = np.array([16.0, 64, 128, 500, 512, 513, 2048, 8192])
    seconds, _ = gemm_seconds(efficiency, sizes, np.full(8, 4096.0), np.full(8, 4096.0))
    assert (np.diff(seconds) > 0).all()


def test_flash_attention_rate() -> None:
    # FlashAttention-3 on H100, head 128, S 8192, causal: about 500-600 TFLOP/s forward (arXiv 2407.08608, fig. 5)
    efficiency = efficiency_of(find_device("h100-80g-sxm")[0])
    flops = np.array([2.0 * 8192**2 * 128 * 32])
    seconds = attention_seconds(efficiency, flops, np.array([8192.0]), np.array([32.0]))
    rate = float(flops[0] / seconds[0]) * 1 / efficiency.sustained["bf16"] / 1e12
    assert rate == pytest.approx(550, rel=0.2)


def test_every_device_of_the_catalogue_has_curves() -> None:
    for name in load_catalog():
        pool = pool_of(name)
        table = price(job_of(MIXTRAL_8X7B, precision="bf16"), pool, options_of(dp=2))
        assert np.isfinite(table.forward_CK).all() and (table.forward_CK > 0).all(), name
        for line in explain(job_of(MIXTRAL_8X7B), pool, options_of(dp=2)):
            assert sum(line.sources.values()) == pytest.approx(line.forward_s + line.backward_s)
            assert set(line.sources) <= {"roofline", "assumed"}


def test_pricing_is_fast_enough_for_a_hundred_thousand_options_per_second() -> None:
    rng = np.random.default_rng(0)
    count = 10_000
    degrees = {
        "tp": [int(value) for value in rng.choice([1, 2, 4, 8], count)],
        "ep": [int(value) for value in rng.choice([1, 2, 4, 8], count)],
        "dp": [int(value) for value in rng.choice([8, 16], count)],
        "mbs": [int(value) for value in rng.choice([1, 2, 4], count)],
    }
    options, pool, job = options_of(**degrees), pool_of("h100-80g-sxm", 16), job_of(DEEPSEEK_V3)
    best = np.inf
    for _ in range(5):
        start = time.thread_time()
        price(job, pool, options)
        best = min(best, time.thread_time() - start)
    assert best < 0.15  # 35 ms of processor time measured; the rest is margin


def test_one_option_is_priced_as_it_is_among_many() -> None:
    job, pool = job_of(DEEPSEEK_V3), pool_of("h100-80g-sxm", 16)
    many = price(job, pool, options_of(tp=[1, 2, 4], ep=[8, 16, 32], dp=32, mbs=[1, 2, 1]))
    one = price(job, pool, options_of(tp=2, ep=16, dp=32, mbs=2))
    assert one.forward_CK[:, 0].tolist() == pytest.approx(many.forward_CK[:, 1].tolist())
    assert one.activation_RCK[:, :, 0].tolist() == many.activation_RCK[:, :, 1].tolist()


def test_explain_adds_up_to_the_price() -> None:
    job, pool, options = job_of(MIXTRAL_8X7B), pool_of("h100-80g-sxm", 2), options_of(tp=2, ep=8, dp=8)
    table = price(job, pool, options)
    lines = [line for line in explain(job, pool, options) if line.block == "moe layer"]
    assert sum(line.forward_s for line in lines) == pytest.approx(float(table.forward_CK[0, 0]), rel=1e-9)
    assert sum(line.backward_s for line in lines) == pytest.approx(float(table.backward_CK[0, 0]), rel=1e-9)
    assert {line.bound for line in lines} <= {"compute", "memory", "network", "latency", "host"}


def test_an_expert_run_by_itself_is_a_plain_gemm() -> None:
    """One expert a rank and no grouped kernel: the projection of a dense MLP over as many tokens (experts.py)."""

    def first_projection_s(job: JobSpec, name: str, **degrees: int) -> float:
        lines = explain(job, pool_of("h100-80g-sxm"), options_of(**degrees))
        return next(line.forward_s for line in lines if line.name == name)

    dense = msgspec.structs.replace(LLAMA2_7B, ffn_hidden=14336)
    plain = first_projection_s(job_of(dense, seq_len=8192), "fc1")  # top 2 of 4096 tokens
    alone = first_projection_s(job_of(MIXTRAL_8X7B, grouped_gemm=False), "expert_fc1", ep=8, dp=8)
    assert alone == pytest.approx(plain, rel=1e-9)
    assert first_projection_s(job_of(MIXTRAL_8X7B), "expert_fc1", ep=8, dp=8) > plain
