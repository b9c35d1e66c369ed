"""The folder of one pool's profile: what is to be run, the files that run it, what came back.

profile.json            what is measured, for which job (``PoolProfile``)
profile.sh              all runs, one after the other, on one node; profile.sbatch: the same by Slurm
probe/, with_probe.sh   the probe, and torchrun with it
alone/                  what times collectives alone (``profiling.sends``)
runs/<name>/            the launch files of each run
results/<name>/         rank<r>.jsonl, complete or not there at all; <name>.log, <name>.failed beside it
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Literal

import msgspec

from hapmoe.cluster import Cluster, Pool
from hapmoe.errors import InputError
from hapmoe.job import JobSpec
from hapmoe.launch.options import LaunchOptions
from hapmoe.launch.parts import Parts, parts, render, template
from hapmoe.launch.write import write_files
from hapmoe.planfile import dump_plan
from hapmoe.profiling.carry import alone_files, probe_files
from hapmoe.profiling.runs import STEPS, Chosen, ProfileRun, alone, plan_of
from hapmoe.profiling.sends import Sends
from hapmoe.tables import shape_key

__all__ = ["PoolProfile", "load_profile", "pool_files", "same_subject", "state", "write_profile"]


class PoolProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``profile.json``: what the runs of a folder measure."""

    schema: int = 1
    pool: str
    device: str
    """As the cluster file calls it."""
    vendor: str
    job: str
    """Its name."""
    model: str
    """``tables.shape_key``."""
    precision: str
    seq_len: int
    command: str = ""
    runs: tuple[ProfileRun, ...]
    sends: Sends | None = None
    """Collectives alone, behind the runs."""
    left_out: dict[str, int] = {}

    @property
    def all_runs(self) -> tuple[ProfileRun | Sends, ...]:
        return (*self.runs, *((self.sends,) if self.sends else ()))


def pool_files(
    job: JobSpec,
    cluster: Cluster,
    pool: Pool,
    chosen: Chosen,
    *,
    timeout_s: int,
    options: LaunchOptions | None = None,
    command: str = "",
) -> tuple[PoolProfile, dict[str, str]]:
    """What a pool's folder says of itself, and its files: relative path -> text. Pure."""
    options = options or LaunchOptions()
    profile = PoolProfile(
        pool=pool.name,
        device=pool.device.name,
        vendor=pool.device.vendor,
        job=job.name,
        model=shape_key(job),
        precision=job.training.precision,
        seq_len=job.training.seq_len,
        command=command,
        runs=chosen.runs,
        sends=chosen.sends,
        left_out=chosen.left_out,
    )
    files = {"profile.json": msgspec.json.format(msgspec.json.encode(profile), indent=1).decode() + "\n"}
    made: Parts | None = None
    for run in chosen.runs:
        short, plan = plan_of(job, cluster, pool, run)
        made = parts(
            short, alone(cluster, pool, run.ranks), plan, dump_plan(plan), start="start_ssh.j2", options=options
        )
        wanted = ("plan.json", "hosts.tsv", "entry.py", "run_node.sh")
        for name, text in made.files.items():
            if name in wanted or name.startswith(("args/", "env/")):
                files[f"runs/{run.name}/{name}"] = text
    assert made is not None
    kind = options.kind(pool)
    most = max(run.processes for run in profile.all_runs)
    asked = [f"--job-name={shlex.quote(f'profile-{pool.name}')}"]
    asked += [f"--time={options.job.time}"] if options.job.time else []
    asked += [f"--account={shlex.quote(options.job.account)}"] if options.job.account else []
    asked += [
        f"--{name}={value}" for name, value in (("partition", kind.partition), ("constraint", kind.constraint)) if value
    ]
    asked += [] if kind.gres == "none" else [f"--gres={kind.gres or f'gpu:{most}'}"]
    values = {
        "name": job.name,
        "pool": pool.name,
        "device": pool.device.name,
        "runs": chosen.runs,
        "sends": chosen.sends,
        "steps": STEPS,
        "timeout_s": timeout_s,
        "variables": made.values["variables"],
        "asked": asked,
        "told": bool(kind.partition or kind.constraint or kind.gres),
    }
    files |= {f"probe/{name}": text for name, text in probe_files().items()}
    if chosen.sends:
        files |= {f"alone/{name}": text for name, text in alone_files().items()}
    files["with_probe.sh"] = template("with_probe.sh")
    files["profile.sh"] = render("profile.sh.j2", values)
    files["profile.sbatch"] = render("profile.sbatch.j2", values)
    return profile, files


def write_profile(folder: Path, files: dict[str, str]) -> Path:
    """Make the folder, whole or not at all; it must not exist yet."""
    if folder.exists() and any(folder.iterdir()):
        raise InputError("exists already", where=str(folder), hint="choose another --out")
    return write_files(folder, files)


def load_profile(folder: Path) -> PoolProfile | None:
    """What a folder measures; None where there is none. InputError for one that is something else."""
    path = folder / "profile.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=PoolProfile)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(error.strerror or str(error), where=str(path)) from None
    except msgspec.MsgspecError as error:
        raise InputError(
            f"not a profile of this version: {error}", where=str(path), hint="choose another --out"
        ) from None


def same_subject(profile: PoolProfile, job: JobSpec, pool: Pool) -> bool:
    """Does it measure this job's layers on this pool?"""
    now = (pool.name, pool.device.name, shape_key(job), job.training.precision, job.training.seq_len)
    return now == (profile.pool, profile.device, profile.model, profile.precision, profile.seq_len)


def state(folder: Path, run: ProfileRun | Sends) -> Literal["done", "failed", "to do"]:
    """How far a run has come."""
    if all((folder / "results" / run.name / f"rank{rank}.jsonl").is_file() for rank in run.started):
        return "done"
    return "failed" if (folder / "results" / f"{run.name}.failed").is_file() else "to do"
