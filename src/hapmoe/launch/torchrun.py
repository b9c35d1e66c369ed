"""Target ``torchrun``: one folder that starts a plan on hosts reached by ssh, or node by node.

torchrun's static rendezvous numbers ranks by the order of nodes (elastic/agent/server/api.py:585);
its default one, c10d, sorts nodes by host name and would put stages on the wrong devices.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from importlib.resources import files as package_files

import msgspec

from hapmoe import backends
from hapmoe.cluster import Cluster, Device
from hapmoe.job import Argument, JobSpec
from hapmoe.plan import Plan, Recompute
from hapmoe.resolve import resolve
from hapmoe.rules.base import Context
from hapmoe.rules.flags import needs_one_connection

__all__ = ["files"]

LAUNCHER_OWNS = frozenset(
    {
        *("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "NNODES", "NPROC_PER_NODE"),
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"),
    }
)
"""Exports of a script that describe its own launch; the plan's takes their place."""

_INTERFACES = {
    "nccl": ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"),
    "rccl": ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"),
    "hccl": ("HCCL_SOCKET_IFNAME",),
    "gloo": (),
}


@dataclass(frozen=True, slots=True)
class Variable:
    """A value that exists only at launch: evaluated once, handed to every node by name."""

    name: str
    expression: str
    """Right-hand side of a shell assignment."""
    shown: str
    comment: str


def files(job: JobSpec, cluster: Cluster, plan: Plan, plan_json: str) -> dict[str, str]:
    """Relative path -> text of every file of the launch. Pure.

    ``plan_json`` is the canonical text of the same plan; ``entry.py`` reads stages from it. A plan
    that the back end cannot launch gets the same files, and scripts that stop with the reason.
    """
    plan = resolve(job, cluster, plan)
    backend = backends.load(plan.backend if backends.capabilities(plan.backend).module else "megatron")
    possible, reason = backend.launchable(job, cluster, plan)
    common, per_stage = backend.stage_arguments(job, plan)
    common = _named_secrets(common)
    kept = {
        name: _sourced(value, name) if value.text is None else value
        for name, value in job.env.items()
        if name not in LAUNCHER_OWNS
    }
    variables = _variables((*common, *kept.values()))
    hosts = _hosts(cluster, plan)
    values = {
        "name": job.name,
        "blocked": "" if possible else reason,
        "variables": tuple(variables.values()),
        "nodes": hosts.count("\n") - 1,
        "world": plan.num_devices,
        "stages": _stage_rows(plan),
        "dropped": [name for name in job.env if name in LAUNCHER_OWNS],
    }
    program = f"module:{job.entry}" if job.entry_is_module else job.entry
    result = {
        "plan.json": plan_json,
        "hosts.tsv": hosts,
        "args/common.args": _arguments(program, common, variables),
        "env/common.env": _exports(kept, variables),
        "entry.py": _template("entry.py"),
        "run_node.sh": _render("run_node.sh.j2", {**values, "blocked": shlex.quote(reason) if reason else ""}),
        "launch.sh": _render("launch.sh.j2", {**values, "blocked": shlex.quote(reason) if reason else ""}),
        "README.txt": _render("README.txt.j2", values),
    }
    for index, words in enumerate(per_stage):
        lines = _lines([shlex.quote(word) for word in words])
        result[f"args/stage_{index}.args"] = f"# Only the ranks of stage {index}.\n{lines}"
    for name, text in _device_exports(job, cluster, plan).items():
        result[f"env/{name}.env"] = text
    return result


def _sourced(argument: Argument, name: str) -> Argument:
    """A value without shell text (a credential that stood in the script) is asked for by name."""
    return argument if argument.source.strip() else msgspec.structs.replace(argument, source=name)


def _named_secrets(arguments: tuple[Argument, ...]) -> tuple[Argument, ...]:
    """Values without shell text get the name of their flag: WANDB_API_KEY for --wandb-api-key."""
    named: list[Argument] = []
    for argument in arguments:
        before = named[-1].text if named else None
        name = re.sub(r"\W+", "_", (before or "").strip("-")).upper()
        if argument.text is None and before is not None and before.startswith("--") and name.isidentifier():
            argument = _sourced(argument, name)
        named.append(argument)
    return tuple(named)


def _variables(arguments: tuple[Argument, ...]) -> dict[str, Variable]:
    """Run-varying values by shell source: the same source is evaluated once."""
    found: dict[str, Variable] = {}
    for argument in arguments:
        key = _source(argument)
        if argument.text is not None or key in found:
            continue
        name = f"HAPMOE_VAR_{len(found)}"
        source = argument.source.strip()
        where = argument.where.rpartition("/")[2]  # no path of the planning machine
        if not source or source.isidentifier():
            # A secret, by the name of its variable.
            said = re.sub(r"[^A-Za-z0-9 ,.:_-]", "", f"export it: {argument.why} {where}").strip()
            expression = f"${{{source or name}:?{said}}}"
        else:
            expression = source
        comment = " ".join(part for part in (where, argument.why) if part).replace("\n", " ")
        shown = " ".join((source or argument.why or "a value").split())
        found[key] = Variable(name, expression, shown, comment)
    return found


def _source(argument: Argument) -> str:
    """What tells run-varying values apart; without a source each stands for itself."""
    return argument.source.strip() or f"\0{id(argument)}"


def _word(argument: Argument, variables: dict[str, Variable]) -> str:
    if argument.text is None:
        return f"${{{variables[_source(argument)].name}}}"
    return shlex.quote(argument.text)


def _arguments(program: str, common: tuple[Argument, ...], variables: dict[str, Variable]) -> str:
    words = [_word(argument, variables) for argument in common]
    return f"# The training program, then what all ranks are given.\n{shlex.quote(program)}\n{_lines(words)}"


def _lines(words: list[str]) -> str:
    """One flag with its values a line."""
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return "".join(f"{line}\n" for line in lines)


def _exports(env: dict[str, Argument], variables: dict[str, Variable]) -> str:
    lines = ["# Exports of the training script, for all devices."]
    for name, value in env.items():
        lines.append(
            f'{name}="{_word(value, variables)}"' if value.text is None else f"{name}={shlex.quote(value.text)}"
        )
    return "\n".join(lines) + "\n"


def _device_exports(job: JobSpec, cluster: Cluster, plan: Plan) -> dict[str, str]:
    """Text of env/<kind>.env for every kind of device in the plan."""
    texts: dict[str, str] = {}
    single = needs_one_connection(Context(job, cluster, plan, backends.capabilities(plan.backend)))
    for stage in plan.stages:
        device = cluster.pool(stage.pool).device
        lines = [f"# For nodes with {device.name}."]
        if device.runtime_names:
            lines += [
                "# Parts of the name that the driver reports; entry.py stops on a device without one of them.",
                f"HAPMOE_DEVICE_NAMES={shlex.quote(','.join(name.lower() for name in device.runtime_names))}",
            ]
        if device.name in single and "CUDA_DEVICE_MAX_CONNECTIONS" not in job.env:
            lines += [
                "# Megatron demands it for tensor or context parallelism (arguments.py:1477).",
                "CUDA_DEVICE_MAX_CONNECTIONS=1",
            ]
        wanted = [name for name in _INTERFACES.get(device.ccl, ()) if name not in job.env]
        if wanted:
            lines += ["# Network interfaces, where the library does not find them by itself:"]
            lines += [f"# {name}=" for name in wanted]
        texts[_file_name(device)] = "\n".join(lines) + "\n"
    return texts


def _hosts(cluster: Cluster, plan: Plan) -> str:
    """One line per node, in rank order; a node that holds several stages stands once."""
    rows: dict[tuple[str, int], tuple[int, list[str]]] = {}
    for index, stage in enumerate(plan.stages):
        for node in stage.nodes:
            slots, stages = rows.get((stage.pool, node), (0, []))
            rows[stage.pool, node] = (slots + stage.num_devices // len(stage.nodes), [*stages, str(index)])
    lines = ["# node_rank\thost\ttype\tslots\tstages"]
    for rank, ((name, node), (slots, stages)) in enumerate(rows.items()):
        pool = cluster.pool(name)
        host = pool.hosts[node] if node < len(pool.hosts) else f"CHANGE-ME-{name}-{node}"
        lines.append(f"{rank}\t{host}\t{_file_name(pool.device)}\t{slots}\t{','.join(stages)}")
    return "\n".join(lines) + "\n"


def _file_name(device: Device) -> str:
    """The device's name as part of a file name (entry.py does the same)."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", device.name)


def _stage_rows(plan: Plan) -> list[dict[str, object]]:
    return [
        {
            "ranks": f"{stage.first_rank}-{stage.first_rank + stage.num_devices - 1}",
            "device": stage.device,
            "layers": stage.num_layers,
            "recompute": _recompute(stage.recompute),
            **{name: getattr(stage, name) for name in ("tp", "cp", "ep", "etp", "dp")},
        }
        for stage in plan.stages
    ]


def _recompute(recompute: Recompute) -> str:
    if recompute.granularity == "full":
        return f"full, {recompute.method} {recompute.num_layers}"
    if recompute.granularity == "selective":
        return f"selective {' '.join(recompute.modules) or 'core_attn'}"
    return "none"


def _template(name: str) -> str:
    return (package_files("hapmoe.launch") / "templates" / name).read_text(encoding="utf-8")


def _render(name: str, values: dict[str, object]) -> str:
    import jinja2

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
    return environment.from_string(_template(name)).render(values)
