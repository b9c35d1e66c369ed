"""Is the plan that the planner picks the fastest? ``python -m bench.unequal [--json] [--by work] [--folder DIR]``.

The model and the two kinds of ``hapmoe demo``: a processor, and the same some times slower, each slowness with its own
profile, from which alone the planner knows of it. For each setting four plans are trained: the planner's, and three
others. Of two plans whose times are less than a factor of two apart the load of the machine may decide: they are
counted aside.

``--by quota``: each rank has a share of a core by the scheduler's quota (``bench.limits``), and wall time is compared.
Where the machine has network namespaces, some settings have a slow link between the two, which the planner learns
from ``hapmoe profile collectives --between fast,slow``; there the plan may leave the slow kind out. ``--by work``: the
slow kind does work that nobody needs, and the CPU time of the busiest rank is compared, which sets the step where
every rank has a core of its own. Without ``--by``: quotas, where they are possible. With ``--folder`` the results
stay, and what is in it is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from bench.lab import free_port
from bench.limits import ADDRESSES, INTERFACE, Ends, cannot_limit, cannot_slow_links, limited, slow_link
from hapmoe import tables
from hapmoe.cluster import Cluster
from hapmoe.clusterfile import load_cluster
from hapmoe.demo import SETTINGS, Trained, learned, script, slowed, split_plan, trained
from hapmoe.extract import extract
from hapmoe.job import JobSpec
from hapmoe.launch import target
from hapmoe.launch.options import KindOptions, LaunchOptions
from hapmoe.launch.write import write_files
from hapmoe.measured import Table
from hapmoe.plan import Plan
from hapmoe.planfile import dump_plan
from hapmoe.search import search

__all__ = ["main"]

SLOW = (2, 3, 4, 5, 6)
"""How many times slower the second kind is."""
LAYERS = (6, 9)
SHARE = 0.6
"""Of a core: what the fast kind has by quota. Both together need less than one."""
LINKS = ((2, 6, 1e6), (3, 6, 2e6), (4, 6, 100e6), (6, 6, 1e6))
"""Slowness, layers, bits per second of the link. A message of the model has 64 KB: 0.5 s at 1 Mb/s."""
BETWEEN = {"MASTER_ADDR": ADDRESSES[0], "GLOO_SOCKET_IFNAME": INTERFACE}
"""Where the ends of a slow link meet."""
STEPS = 3
"""Measured of each plan, the first of which makes buffers."""
APART = 2.0
NEEDED = 0.9
"""Share of the settings, and of the comparisons of plans that are far apart, which must come out right."""


@dataclass(frozen=True)
class Timed:
    """One plan: layers on the fast and on the slow kind, seconds of a step (``--by work``: of its busiest rank)."""

    layers: tuple[int, int]
    predicted_s: float
    measured_s: float


@dataclass(frozen=True)
class Setting:
    """The picked plan and three others, on one pair of kinds."""

    slow: int
    layers: int
    link: float
    """Bits per second; 0: the machine's own."""
    picked: Timed
    others: tuple[Timed, ...]

    @property
    def right(self) -> bool:
        return all(self.picked.measured_s < other.measured_s for other in self.others)

    def pairs(self) -> Iterator[tuple[bool, bool]]:
        """(far apart, in the predicted order) of every two plans."""
        for a, b in combinations((self.picked, *self.others), 2):
            small, large = sorted((a.measured_s, b.measured_s))
            yield large >= APART * small, (a.measured_s < b.measured_s) == (a.predicted_s < b.predicted_s)


def others(layers: int, picked: tuple[int, int], *, alone: bool) -> list[tuple[int, int]]:
    """Three other splits: all on the fast kind (``alone``), even, the picked one turned around, nearly all on the
    slow kind."""
    even = (layers - layers // 2, layers // 2)
    wanted = [(layers, 0)] if alone else []
    wanted += [even, picked[::-1], (1, layers - 1), (2, layers - 2), (layers - 2, 2)]
    return [one for one in dict.fromkeys(wanted) if one != picked and one[0]][:3]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.unequal", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--by", choices=("quota", "work"))
    parser.add_argument("--folder", type=Path, metavar="DIR", help="keep results here, and go on from those it holds")
    options = parser.parse_args(arguments)
    missing = cannot_limit() if options.by != "work" else ""
    if options.by == "quota" and missing:
        parser.error(missing)
    quota = options.by != "work" and not missing
    no_links = cannot_slow_links() if quota else "no slow links: CPU time does not see them"
    means = ["quotas: shares of a core, wall time" if quota else f"by work: CPU time of the busiest rank {missing}"]
    means.append(no_links or "links slowed down between network namespaces")
    say = sys.stderr if options.json else sys.stdout
    print("; ".join(means), file=say, flush=True)
    settings = [(slow, layers, 0.0) for slow in SLOW for layers in LAYERS] + list(() if no_links else LINKS)
    found: list[Setting] = []
    with tempfile.TemporaryDirectory(prefix="hapmoe-unequal-") as name:
        root = options.folder.resolve() if options.folder else Path(name)
        for slow, layers, link in settings:
            found.append(_setting(root / f"{'quota' if quota else 'slow'}{slow}", slow, layers, link, quota=quota))
            print(_line(found[-1]), file=say, flush=True)
    fastest = sum(one.right for one in found)
    far = [right for one in found for apart, right in one.pairs() if apart]
    near = [right for one in found for apart, right in one.pairs() if not apart]
    if options.json:
        counts: dict[str, object] = {"means": means, "settings": len(found), "picked_is_fastest": fastest}
        counts |= {"far_apart": len(far), "in_order": sum(far), "nearer": len(near), "nearer_in_order": sum(near)}
        print(json.dumps(counts, indent=1))
    else:
        print(f"the picked plan is the fastest of four in {fastest} of {len(found)} settings")
        print(f"of pairs at least {APART:g} times apart {sum(far)} of {len(far)} are in the predicted order")
        print(f"(of the nearer ones {sum(near)} of {len(near)})")
    return 0 if fastest >= NEEDED * len(found) and sum(far) >= NEEDED * len(far) else 1


def _setting(folder: Path, slow: int, layers: int, link: float, *, quota: bool) -> Setting:
    kept = folder / f"{layers}{f'-{link:.0f}' if link else ''}.json"
    if not kept.exists():
        with ExitStack() as limits:
            launch, ends = slowed(slow), None
            if quota:
                groups = {"cpu-fast": SHARE, "cpu-slow": SHARE / slow}
                launch = LaunchOptions(
                    kinds={
                        kind: KindOptions(env={"HAPMOE_LAB_CGROUP": str(limits.enter_context(limited(share)))})
                        for kind, share in groups.items()
                    }
                )
            if link:
                ends = limits.enter_context(slow_link(link))
            rows = _four(folder, slow, layers, link, launch, ends, by_wall=quota)
        kept.write_text(json.dumps([(one.layers, one.predicted_s, one.measured_s) for one in rows]))
    rows = [Timed((a, b), *times) for (a, b), *times in json.loads(kept.read_text())]
    return Setting(slow, layers, link, rows[0], tuple(rows[1:]))


def _four(
    folder: Path, slow: int, layers: int, link: float, launch: LaunchOptions, ends: Ends | None, *, by_wall: bool
) -> list[Timed]:
    """The picked plan and three others, trained."""
    if not (folder / "tables").exists():
        learned(
            folder,
            lambda text: print(f"{slow} times slower: {text}", file=sys.stderr),
            launch,
            script(layers, STEPS + 1),
            by_wall=by_wall,
        )
    (folder / f"{layers}.sh").write_text(script(layers, STEPS + 1))
    job = extract(folder / f"{layers}.sh")
    measured = list(tables.load(folder / "tables"))
    if ends is not None:
        measured += _link_measured(folder / f"link{link:.0f}", ends)
    cluster = tables.attach(load_cluster(folder / "cluster.yaml"), measured)
    # with a slow link the plan may leave the slow kind out; without, the fast one alone is not far behind
    best = search(job, cluster, settings=SETTINGS[:1] if link else SETTINGS).plan
    assert best is not None
    rows = [_timed(folder, job, cluster, best, launch, ends, by_wall=by_wall)]
    for split in others(layers, rows[0].layers, alone=bool(link)):
        used = [(pool, count) for pool, count in zip(("fast", "slow"), split, strict=True) if count]
        plan = split_plan(job, cluster, [pool for pool, _ in used], [count for _, count in used])
        rows.append(_timed(folder, job, cluster, plan, launch, ends, by_wall=by_wall))
    return rows


def _link_measured(folder: Path, ends: Ends) -> tuple[Table, ...]:
    """What a message takes from one end to the other: both ends run hapmoe's own command, as torchrun would."""
    words = [sys.executable, "-m", "hapmoe", "profile", "collectives", "--between", "fast,slow", "--device", "cpu"]
    words += ["--tables", str(folder), "--max-bytes", "64 KiB"]
    own = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
    env = {**os.environ, **BETWEEN, **own, "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen([*end, *words], env=env | {"RANK": str(rank)}, stdout=subprocess.DEVNULL)
        for rank, end in enumerate(ends)
    ]
    assert [one.wait(timeout=300) for one in ranks] == [0, 0]
    return tables.load(folder)


def _timed(
    folder: Path, job: JobSpec, cluster: Cluster, plan: Plan, launch: LaunchOptions, ends: Ends | None, *, by_wall: bool
) -> Timed:
    counts = {pool: sum(stage.num_layers for stage in plan.stages if stage.pool == pool) for pool in ("fast", "slow")}
    label = "{}-{}".format(*counts.values())
    with tempfile.TemporaryDirectory(dir=folder) as name:
        place = Path(name)
        (place / "profile").symlink_to(folder / "profile")
        write_files(place / label, target("torchrun")(job, cluster, plan, dump_plan(plan), launch))
        found: Trained = trained(
            label, job, cluster, plan, place, steps=STEPS, variables=BETWEEN if ends else None, before=ends or ()
        )
    times = (found.estimate.step_s, found.step_s) if by_wall else (max(found.expected_s), max(found.busy_s))
    return Timed((counts["fast"], counts["slow"]), *times)


def _line(one: Setting) -> str:
    told = ", ".join(
        f"{plan.layers[0]}+{plan.layers[1]} {plan.predicted_s * 1e3:.0f}/{plan.measured_s * 1e3:.0f}"
        for plan in (one.picked, *one.others)
    )
    link = f", link {one.link / 1e6:g} Mb/s" if one.link else ""
    return (
        f"{one.slow} times slower, {one.layers} layers{link}: {'right' if one.right else 'WRONG'}; "
        f"layers fast+slow, ms predicted/measured: {told}"
    )


if __name__ == "__main__":
    sys.exit(main())
