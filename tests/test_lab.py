"""The CPU lab's parts that need no training run: arguments, import hooks, and that nothing happens unasked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hapmoe.lab.arguments import parse

SOURCE = Path(__file__).parents[1] / "src"
SMALL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --vocab-size 500"


def python(code: str, **variables: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONWARNINGS": "ignore", **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_defaults_are_megatrons() -> None:
    args = parse(SMALL.split(), world_size=4)
    assert (args.ffn_hidden_size, args.padded_vocab_size, args.moe_router_topk) == (256, 512, 2)
    assert (args.data_parallel_size, args.global_batch_size, args.num_microbatches) == (4, 8, 1)
    assert args.moe_token_dispatcher_type == "allgather" and args.normalization == "LayerNorm"
    assert parse([*SMALL.split(), "--tensor-model-parallel-size", "2"], 2).padded_vocab_size == 512


@pytest.mark.parametrize(
    ("text", "pattern"), [("2", 2), ("[0,1,1,1]", [0, 1, 1, 1]), ("([0]*1+[1]*3)*1", [0, 1, 1, 1])]
)
def test_layer_frequency(text: str, pattern: object) -> None:
    assert parse([*SMALL.split(), "--moe-layer-freq", text], 1).moe_layer_freq == pattern


@pytest.mark.parametrize(
    "more",
    [
        "--fp8-format hybrid",  # changes what is trained: not to be ignored
        "--moe-grouped-gemm",
        "--tensor-model-parallel-size 3",
        "--global-batch-size 3",
    ],
)
def test_what_it_cannot_do_is_refused(more: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([*SMALL.split(), *more.split()], world_size=4)
    assert more.split()[0].lstrip("-").split("-")[0] in capsys.readouterr().err.replace("tp *", "tensor")


def test_layer_frequency_is_not_executed() -> None:
    with pytest.raises((SystemExit, ValueError)):
        parse([*SMALL.split(), "--moe-layer-freq", "(__import__('os').getpid())"], 1)


def test_layouts_tell_the_number_of_virtual_stages() -> None:
    two = [*SMALL.split(), "--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout"]
    assert parse([*two, "Et|t|t|tL"], 2).virtual_stages == 2
    assert parse([*two, "Et*3|tL"], 2).virtual_stages is None


def test_nothing_is_redirected_unasked() -> None:
    code = "import sys, hapmoe.lab; print('torch' in sys.modules, hapmoe.lab.requested())"
    assert python(code, HAPMOE_LAB="") == "False False"
    assert python(code, HAPMOE_LAB="1") == "False True"


def test_redirection_happens_once_and_only_megatron_believes_in_cuda() -> None:
    code = """
from hapmoe.lab import shim
shim.install()
import torch
before = (torch.zeros, torch.distributed.all_gather, torch.Tensor.to)
shim.install()
assert before == (torch.zeros, torch.distributed.all_gather, torch.Tensor.to)
assert torch.zeros(2, device="cuda").device.type == "cpu" and torch.ones(1).cuda().device.type == "cpu"
assert torch.ones(1).to(0).device.type == "cpu" and torch.cuda.get_device_name(0) == shim.DEVICE_NAME
event = torch.cuda.Event(enable_timing=True); event.record(); event.synchronize()
with torch.cuda.stream(torch.cuda.Stream()): pass
print(torch.cuda.is_available())
"""
    assert python(code) == "True"


def test_import_hooks_run_once_after_the_module(tmp_path: Path) -> None:
    (tmp_path / "hooked.py").write_text("value = 1\n")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from hapmoe.probe.imports import when_imported
seen = []
when_imported("hooked", lambda module: seen.append(module.value))
import hooked, importlib
importlib.import_module("hooked")
when_imported("hooked", lambda module: seen.append(module.value + 1))
print(seen)
"""
    assert python(code) == "[1, 2]"
