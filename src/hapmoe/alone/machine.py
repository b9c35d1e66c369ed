"""The device that is measured: what its driver calls it, which software, how to wait for it and to time it."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hapmoe.errors import InputError

__all__ = ["Machine", "find_machine", "processors", "timings"]


@dataclass(frozen=True, slots=True)
class Machine:
    """One device of this host, by torch."""

    torch: Any
    type: str
    """cuda (NVIDIA and AMD), npu or cpu: a device type of torch."""
    name: str
    """As the driver says it; of a CPU as the kernel says it."""
    software: dict[str, str]
    clocks: str
    note: str

    @property
    def backend(self) -> str:
        """torch.distributed's: nccl (RCCL on AMD), hccl or gloo."""
        return {"cuda": "nccl", "npu": "hccl"}.get(self.type, "gloo")

    @property
    def devices(self) -> Any:
        """torch.cuda or torch.npu; None on a CPU."""
        return getattr(self.torch, self.type) if self.type != "cpu" else None

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.devices is not None:
            self.devices.synchronize()


def find_machine(wanted: str | None = None) -> Machine:
    """The accelerator that torch finds, or the CPU; ``wanted`` names a type that must be there."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        hint = "install the build of torch that belongs to this machine's devices"
        raise InputError("torch is not installed", where="hapmoe profile", hint=hint) from None
    if wanted in (None, "npu"):
        with contextlib.suppress(ImportError):
            importlib.import_module("torch_npu")  # registers the device type
    there = [name for name in ("npu", "cuda") if getattr(torch, name, None) and getattr(torch, name).is_available()]
    there.append("cpu")
    if wanted is not None and wanted not in there:
        raise InputError(f"torch finds no {wanted} device here", where="--device", hint=f"one of {', '.join(there)}")
    type_ = wanted or there[0]
    software = {"torch": str(torch.__version__)}
    if type_ == "cpu":
        threads = int(os.environ.get("OMP_NUM_THREADS", "1"))  # one, as a rank of the CPU lab has
        torch.set_num_threads(threads)
        return Machine(torch, type_, _processor(), software, "", f"CPU time, {threads} threads")
    devices = getattr(torch, type_)
    if type_ == "cuda":
        hip = getattr(torch.version, "hip", None)
        software |= {"rocm": str(hip)} if hip else {"cuda": str(torch.version.cuda)}
        software["rccl" if hip else "nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        if driver := _ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"):
            software["driver"] = driver
    else:
        software["torch_npu"] = str(importlib.import_module("torch_npu").__version__)
    clocks = _ask("nvidia-smi", "--query-gpu=clocks.max.sm,clocks.max.mem,power.limit", "--format=csv,noheader")
    return Machine(torch, type_, str(devices.get_device_name(devices.current_device())), software, clocks, "")


def _ask(*command: str) -> str:
    """The first line of what a tool says; empty where it is not there."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().split("\n")[0] if done.returncode == 0 else ""


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as stream:
            named = next((line.partition(":")[2].strip() for line in stream if line.startswith("model name")), "")
    except OSError:
        named = ""
    return named or platform.processor() or platform.machine()


def timings(machine: Machine, act: Callable[[], object], *, samples: int = 20, share_s: float = 0.5) -> list[float]:
    """Seconds of one call of ``act``, timed several times.

    Each timing is over as many calls as make it well longer than the timer's grain, so that launches
    overlap as they do in training; ``share_s`` is the time to spend on all of them. On a CPU it is the
    time of the process's threads: others that share the processor do not count.
    """
    for _ in range(3):
        act()
    machine.wait()
    began = time.perf_counter()
    act()
    machine.wait()
    about_s = max(time.perf_counter() - began, 1e-7)
    calls = max(1, min(100, round(2e-3 / about_s)))
    samples = max(5, min(samples, round(share_s / (calls * about_s))))
    result = []
    for _ in range(samples):
        if machine.devices is None:
            began = time.process_time()
            for _ in range(calls):
                act()
            result.append((time.process_time() - began) / calls)
            continue
        start, end = machine.devices.Event(enable_timing=True), machine.devices.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            act()
        end.record()
        machine.wait()
        result.append(start.elapsed_time(end) / 1e3 / calls)
    return result


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
