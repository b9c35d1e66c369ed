"""What every target emits: arguments, environment, the entry of a rank and the script of a node.

A target adds the file that starts ``run_node.sh`` on every node with its NODE_RANK. Pure: no clock, no
environment, no disk.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, replace
from importlib.resources import files as package_files
from itertools import groupby

import msgspec

from hapmoe import backends
from hapmoe.cluster import Cluster, Pool
from hapmoe.errors import Unsupported
from hapmoe.job import Argument, JobSpec
from hapmoe.launch.environment import device_exports, file_name
from hapmoe.launch.options import LaunchOptions
from hapmoe.launch.verdict import verdict
from hapmoe.plan import Plan, Recompute
from hapmoe.resolve import resolve

__all__ = ["Component", "Host", "Parts", "parts", "render", "template"]

RUNTIME = "hapmoe_runtime"
"""Folder, and name for import, of the runtime's copy beside entry.py."""

LAUNCHER_OWNS = frozenset(
    {
        *("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "NNODES", "NPROC_PER_NODE"),
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"),
    }
)
"""Exports of a script that describe its own launch; the plan's takes their place."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A value that exists only at launch: evaluated once, handed to every node by name."""

    name: str
    expression: str
    """Right-hand side of a shell assignment."""
    shown: str
    comment: str


@dataclass(frozen=True, slots=True)
class Host:
    """One line of hosts.tsv."""

    node_rank: int
    host: str
    pool: Pool
    node: int
    """Within the pool."""
    slots: int
    stages: tuple[int, ...]

    @property
    def kind(self) -> str:
        return file_name(self.pool.device)


@dataclass(frozen=True, slots=True)
class Component:
    """Neighbouring nodes of one pool with equally many ranks: what a scheduler is asked for at once."""

    name: str
    """Unique, fit for host names."""
    pool: Pool
    first: int
    """Node rank of its first node."""
    nodes: int
    slots: int


@dataclass(frozen=True, slots=True)
class Parts:
    """The files of a launch without the one that starts it, and what that one is made from."""

    files: dict[str, str]
    hosts: tuple[Host, ...]
    components: tuple[Component, ...]
    blocked: str
    """Why the plan cannot be launched; empty: it can."""
    values: dict[str, object]
    """For templates: name, blocked (quoted), variables, nodes, world, stages, dropped."""


def parts(
    job: JobSpec,
    cluster: Cluster,
    plan: Plan,
    plan_json: str,
    *,
    start: str,
    options: LaunchOptions | None = None,
    names: str = "CHANGE-ME-{pool}-{node}",
    given_hosts: bool = True,
) -> Parts:
    """Everything but the starter. ``start`` is the template of README.txt's first section.

    ``plan_json`` is the canonical text of the same plan; ``entry.py`` reads stages from it. A plan
    that the back end cannot launch gets the same files, and scripts that stop with the reason.
    ``names``: host names of a target that assigns them itself (``given_hosts`` False), or of hosts
    that the cluster file does not name; with pool, node, component, index.
    """
    options = options or LaunchOptions()
    if wanted := backends.capabilities(plan.backend).own_target:
        raise Unsupported(f"no launcher starts back end {plan.backend}: use target {wanted}")
    plan = resolve(job, cluster, plan)
    backend = backends.load(plan.backend if backends.capabilities(plan.backend).module else "megatron")
    possible, reason = verdict(job, cluster, plan)
    common, per_stage = backend.stage_arguments(job, plan, cluster)
    common = _named_secrets(common)
    kept = {
        name: _sourced(value, name) if value.text is None else value
        for name, value in job.env.items()
        if name not in LAUNCHER_OWNS
    }
    variables = _variables((*common, *kept.values()))
    hosts = _hosts(cluster, plan)
    components = _components(hosts)
    hosts = _named(hosts, components, names, given_hosts=given_hosts)
    values: dict[str, object] = {
        "name": job.name,
        "blocked": shlex.quote(reason) if not possible else "",
        "reason": reason if not possible else "",
        "variables": tuple(variables.values()),
        "nodes": len(hosts),
        "world": plan.num_devices,
        "stages": _stage_rows(plan),
        "note": backends.capabilities(plan.backend).note,
        "dropped": [name for name in job.env if name in LAUNCHER_OWNS],
    }
    result = {
        "plan.json": plan_json,
        "hosts.tsv": _table(hosts),
        "args/common.args": _arguments(backend.program(job), common, variables),
        "env/common.env": _exports(kept, variables),
        "entry.py": template("entry.py"),
        "check_hosts.py": template("check_hosts.py"),
        "check_ranks.py": template("check_ranks.py"),
        "run_node.sh": render("run_node.sh.j2", values),
        "README.txt": render("README.txt.j2", {**values, "start": render(start, values).rstrip("\n")}),
    }
    for index, words in enumerate(per_stage):
        own = options.kind(cluster.pool(plan.stages[index].pool)).arguments
        lines = _lines([shlex.quote(word) for word in (*words, *own)])
        result[f"args/stage_{index}.args"] = f"# Only the ranks of stage {index}.\n{lines}"
    for kind, text in device_exports(job, cluster, plan, options).items():
        result[f"env/{kind}.env"] = text
    if backends.capabilities(plan.backend).runtime:
        libraries = tuple(cluster.pool(stage.pool).device.ccl for stage in plan.stages)
        result |= _runtime(backend.transports(cluster, plan), libraries, joins=backend.needs_runtime(cluster, plan))
    if plan.backend == "flagscale-patched":
        result["flagscale/hapmoe-hetero.patch"] = template("hapmoe-hetero.patch")
    return Parts(result, hosts, components, "" if possible else reason, values)


def _runtime(transports: tuple[str, ...], libraries: tuple[str, ...], *, joins: bool) -> dict[str, str]:
    """A copy of ``hapmoe.runtime`` for hosts that have no hapmoe, and what plan.json does not tell it.

    Equal stages need nothing joined (``joins``), but checkpoints that unequal ones can go on from.
    """
    told = json.dumps({"transports": transports, "libraries": libraries, "joins": joins})
    files = {
        f"{RUNTIME}/{source.name}": source.read_text(encoding="utf-8")
        for source in package_files("hapmoe.runtime").iterdir()
        if source.name.endswith(".py")
    }
    return {"runtime.json": f"{told}\n", **dict(sorted(files.items()))}


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


def _hosts(cluster: Cluster, plan: Plan) -> tuple[Host, ...]:
    """The nodes in rank order, without names; one that holds several stages stands once."""
    rows: dict[tuple[str, int], tuple[int, list[int]]] = {}
    for index, stage in enumerate(plan.stages):
        for node in stage.nodes:
            slots, stages = rows.get((stage.pool, node), (0, []))
            rows[stage.pool, node] = (slots + stage.num_devices // len(stage.nodes), [*stages, index])
    return tuple(
        Host(rank, "", cluster.pool(name), node, slots, tuple(stages))
        for rank, ((name, node), (slots, stages)) in enumerate(rows.items())
    )


def _components(hosts: tuple[Host, ...]) -> tuple[Component, ...]:
    found: list[Component] = []
    for (pool, slots), group in groupby(hosts, key=lambda host: (host.pool.name, host.slots)):
        rows = list(group)
        base = re.sub(r"[^a-z0-9]+", "-", pool.lower()).strip("-")[:24].rstrip("-") or "pool"
        name = base if all(other.name != base for other in found) else f"{base}-{len(found)}"
        found.append(Component(name, rows[0].pool, rows[0].node_rank, len(rows), slots))
    return tuple(found)


def _named(
    hosts: tuple[Host, ...], components: tuple[Component, ...], names: str, *, given_hosts: bool
) -> tuple[Host, ...]:
    named: list[Host] = []
    for component in components:
        for index in range(component.nodes):
            host = hosts[component.first + index]
            known = given_hosts and host.node < len(host.pool.hosts)
            name = (
                host.pool.hosts[host.node]
                if known
                else names.format(pool=host.pool.name, node=host.node, component=component.name, index=index)
            )
            named.append(replace(host, host=name))
    return tuple(named)


def _table(hosts: tuple[Host, ...]) -> str:
    lines = ["# node_rank\thost\ttype\tslots\tstages"]
    for host in hosts:
        stages = ",".join(map(str, host.stages))
        lines.append(f"{host.node_rank}\t{host.host}\t{host.kind}\t{host.slots}\t{stages}")
    return "\n".join(lines) + "\n"


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


def template(name: str) -> str:
    """A file of this package as it is."""
    return (package_files("hapmoe.launch") / "templates" / name).read_text(encoding="utf-8")


def render(name: str, values: dict[str, object]) -> str:
    """A template of this package filled in; what it names must be there."""
    import jinja2

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
    return environment.from_string(template(name)).render(values)
