"""Clocks of a step: events on an accelerator's stream, or the host's wall and CPU time."""

from __future__ import annotations

import resource
import time
from typing import Any

__all__ = ["Clock", "DeviceClock", "HostClock", "choose"]


class HostClock:
    """Wall and CPU time of this process, where tensors are on the CPU."""

    name = "host"

    def __init__(self) -> None:
        self.device = _processor()
        self.library = ""

    def mark(self) -> Any:
        return time.perf_counter(), time.process_time()

    def settle(self) -> None:
        """Wait until every mark can be read."""

    def seconds(self, begin: Any, end: Any) -> dict[str, float]:
        return {"wall_s": end[0] - begin[0], "cpu_s": end[1] - begin[1]}

    def memory(self) -> dict[str, int]:
        """Bytes of the whole process."""
        with open("/proc/self/statm") as stream:
            resident = int(stream.read().split()[1]) * resource.getpagesize()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"allocated_bytes": resident, "peak_bytes": max(peak, resident), "reserved_bytes": resident}


class DeviceClock:
    """Events on the current stream (torch.cuda, which ROCm builds share, or torch.npu).

    Nothing waits while a step runs: the events are read when it is over.
    """

    name = "device"

    def __init__(self, torch: Any, devices: Any) -> None:
        self._devices = devices
        self.device = str(devices.get_device_name(devices.current_device()))
        self.library = ".".join(map(str, torch.cuda.nccl.version())) if devices is torch.cuda else ""
        # a recorded event would become part of the graph that is being captured
        self._capturing = getattr(devices, "is_current_stream_capturing", lambda: False)

    def mark(self) -> Any:
        if self._capturing():
            return None
        event = self._devices.Event(enable_timing=True)
        event.record()
        return event

    def settle(self) -> None:
        """Wait until every mark can be read."""
        self._devices.synchronize()

    def seconds(self, begin: Any, end: Any) -> dict[str, float]:
        if begin is None or end is None:
            return {}
        return {"wall_s": begin.elapsed_time(end) / 1e3}

    def memory(self) -> dict[str, int]:
        """Bytes of the allocator, and all of the device in use as its driver counts.

        The peak is never reset: the training program may report its own.
        """
        devices = self._devices
        found = {
            "allocated_bytes": int(devices.memory_allocated()),
            "peak_bytes": int(devices.max_memory_allocated()),
            "reserved_bytes": int(devices.memory_reserved()),
        }
        if hasattr(devices, "mem_get_info"):
            free, total = devices.mem_get_info()
            found["device_bytes"] = int(total - free)
        return found


Clock = HostClock | DeviceClock


def _processor() -> str:
    """The processor as the kernel names it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as stream:
            named = [line.partition(":")[2].strip() for line in stream if line.startswith("model name")]
    except OSError:
        named = []
    return named[0] if named else "cpu"


def choose(torch: Any) -> Clock:
    """The accelerator's clock where there is one."""
    for name in ("npu", "cuda"):
        devices = getattr(torch, name, None)
        if devices is not None and devices.is_available():
            return DeviceClock(torch, devices)
    return HostClock()
