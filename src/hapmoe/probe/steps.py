"""One training step at a time: what its passes, its optimizer and its routers do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .clock import Clock, choose
from .collectives import Collectives, Key, Sent

__all__ = ["Steps"]


class _Step:
    """Marks of a step that is under way."""

    def __init__(self, mark: Any) -> None:
        self.begin = mark
        self.passes_end: Any = None
        self.end: Any = None
        self.spans: dict[str, list[tuple[Any, Any]]] = {"forward": [], "backward": [], "optimizer": []}
        self.tokens: dict[int, list[Any]] = {}
        self.memory: list[dict[str, Any]] = []


class Steps:
    """Records steps and hands each finished one to ``write``; the wrappers of Megatron's functions.

    A step reaches from the beginning of its first forward pass to the end of its optimizer. While
    ``active`` is false every wrapper only passes on.
    """

    def __init__(self, torch: Any, write: Callable[[dict[str, Any]], None]) -> None:
        self.active = True
        self.collectives = Collectives(self._mark)
        self._torch = torch
        self._write = write
        self._chosen: Clock | None = None
        self._open: _Step | None = None
        self._count = 0
        self._ended_s: float | None = None
        self._deep = False

    @property
    def clock(self) -> Clock:
        """Chosen at the first step, when the process has its device."""
        if self._chosen is None:
            self._chosen = choose(self._torch)
        return self._chosen

    def passes(self, act: Callable[..., Any]) -> Callable[..., Any]:
        """Around forward_backward_*: all microbatches of a step. Evaluation is no step."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.active or kwargs.get("forward_only") or self._deep:
                return act(*args, **kwargs)
            if self._open is not None and self._open.passes_end is not None:
                self._finish()  # an optimizer that is not Megatron's, or a step that was skipped
            self._begin()
            self._deep = True
            try:
                result = act(*args, **kwargs)
            except BaseException:
                self._drop()
                raise
            finally:
                self._deep = False
            if self._open is not None:
                self._open.passes_end = self._mark()
                self._remember("passes")
            return result

        return call

    def timed(self, phase: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Around forward_step and backward_step: one microbatch through one chunk."""

        def make(act: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                step = self._open
                if step is None or not self.active:
                    return act(*args, **kwargs)
                return self._span(step, phase, act, args, kwargs)

            return call

        return make

    def optimizer(self, act: Callable[..., Any]) -> Callable[..., Any]:
        """Around every optimizer's step; of one that steps others only the outermost counts."""

        def call(*args: Any, **kwargs: Any) -> Any:
            step = self._open
            if step is None or not self.active or self.collectives.phase == "optimizer":
                return act(*args, **kwargs)
            result = self._span(step, "optimizer", act, args, kwargs)
            self._finish()
            return result

        return call

    def router(self, act: Callable[..., Any]) -> Callable[..., Any]:
        """Around TopKRouter.forward, which returns (probabilities, map of tokens to experts)."""

        def call(router: Any, *args: Any, **kwargs: Any) -> Any:
            result = act(router, *args, **kwargs)
            # inside of autograd it is a forward pass that is computed again
            if self.active and self._open is not None and self._torch._C._current_graph_task_id() == -1:
                layer = int(router.layer_number or 0) - 1
                if getattr(router, "is_mtp_layer", False):  # numbered anew since core 0.17, behind the others before
                    layer += int(router.config.num_layers)
                chosen = result[1]
                self._open.tokens.setdefault(layer, []).append(chosen.reshape(-1, chosen.shape[-1]).sum(dim=0))
            return result

        return call

    def _span(self, step: _Step, phase: str, act: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        before, self.collectives.phase = self.collectives.phase, phase
        begin = self._mark()
        try:
            return act(*args, **kwargs)
        finally:
            step.spans[phase].append((begin, self._mark()))
            self.collectives.phase = before

    def _mark(self) -> Any:
        return self.clock.mark()

    def _begin(self) -> None:
        self.collectives.take()
        self._open = _Step(self._mark())
        self._remember("begin")
        self.collectives.counting, self.collectives.phase = True, "schedule"

    def _drop(self) -> None:
        self._open = None
        self.collectives.counting = False

    def _remember(self, where: str) -> None:
        assert self._open is not None
        self._open.memory.append({"mark": where, **self.clock.memory()})

    def _finish(self) -> None:
        step = self._open
        assert step is not None
        step.end = self._mark()
        self._remember("step")
        sent = self.collectives.take()
        self._drop()
        self.clock.settle()
        ended, self._count = time.perf_counter(), self._count + 1
        seconds = self.clock.seconds
        row: dict[str, Any] = {"event": "step", "step": self._count, **seconds(step.begin, step.end)}
        row["since_last_s"] = ended - self._ended_s if self._ended_s is not None else None
        for phase, spans in step.spans.items():
            row[phase] = [seconds(begin, end) for begin, end in spans]
        row["tokens"] = [
            {"layer": layer, "microbatches": [counts.tolist() for counts in rows]}
            for layer, rows in sorted(step.tokens.items())
        ]
        row["collectives"] = [self._collective(key, one) for key, one in sorted(sent.items())]
        row["memory"] = step.memory
        self._ended_s = time.perf_counter()
        self._write(row)

    def _collective(self, key: Key, sent: Sent) -> dict[str, Any]:
        phase, collective, axis, ranks, size = key
        times = [self.clock.seconds(begin, end).get("wall_s") for begin, end in sent.marks]
        known = [one for one in times if one is not None]
        row = {"phase": phase, "collective": collective, "axis": axis, "ranks": ranks, "call_bytes": size}
        return {**row, "calls": sent.calls, "timed_calls": len(known), "wall_s": sum(known)}
