"""Unwrapping launchers: from a command's words to the training entry, or to the command or shell code inside."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from .launched import Around, Entry, Inside, Refused, integer, product, quotient, slurm_around
from .options import LAUNCHERS, Parsed, UnknownOption, parse_options
from .values import MARK, Text

__all__ = ["unwrap"]

_PYTHON = re.compile(r"(?:.*/)?(?:python|pypy)(?:\d+(?:\.\d+)?)?")
_TORCH_MODULES = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "torch.distributed.elastic.multiprocessing",
    "torch.distributed.launcher.api",
    "paddle.distributed.launch",
    "torch_npu.distributed.launch",
)
_NOT_ENTRIES = frozenset(
    (
        "pip",
        "venv",
        "ensurepip",
        "http.server",
        "json.tool",
        "site",
        "compileall",
        "torch.utils.collect_env",
        "pytest",
        "nltk.downloader",
        "IPython",
        "cProfile",
        "pdb",
        "timeit",
        "zipfile",
    )
)


def unwrap(
    words: list[Text], around: Around, environment: Callable[[str], str | None], opaque: Callable[[str], bool]
) -> Entry | Inside | None:
    """One step inwards. None: no launcher that is known. Raises :class:`Refused` where an option is not known."""
    base = words[0].text.rpartition("/")[2]
    if _PYTHON.fullmatch(words[0].text):
        return _python(words, around, environment, opaque)
    name = "torchrun" if re.fullmatch(r"torchrun\d*", base) else base
    if name in ("bash", "sh", "zsh", "dash", "ksh"):
        return _shell(words, around)
    spec = LAUNCHERS.get(name)
    if spec is None:
        return None
    rest = words[1:]
    subcommands = {
        "accelerate": ("launch",),
        "docker": ("run", "exec"),
        "podman": ("run", "exec"),
        "nsys": ("profile", "launch"),
        "singularity": ("exec", "run"),
        "apptainer": ("exec", "run"),
        "enroot": ("start", "exec"),
        "uv": ("run",),
        "ray": ("job",),
        "conda": ("run",),
    }
    if name in subcommands:
        if not rest or rest[0].text not in subcommands[name]:
            return Inside("none", (), around)
        verb, rest = rest[0].text, rest[1:]
        if name == "ray":
            if not rest or rest[0].text != "submit":
                return Inside("none", (), around)
            rest = rest[1:]
    else:
        verb = ""
    try:
        parsed = parse_options(spec, [word.text for word in rest], opaque)
    except UnknownOption as option:
        shown = MARK.sub("?", str(option))
        raise Refused(
            f"{base} has an option that is not known here ({shown}), so where the training command begins is not clear"
        ) from None
    head, tail = rest[: parsed.used], rest[parsed.used :]
    if name == "torchrun":
        return _torchrun("torchrun", head, tail, parsed, around, environment, opaque, python=())
    if name in ("deepspeed", "accelerate", "msrun"):
        return _other_launcher(name, head, tail, parsed, around)
    if name in ("srun", "sbatch"):
        return _slurm(name, words, head, tail, parsed, around)
    if LAUNCHERS[name] is LAUNCHERS["mpirun"]:
        return _mpi(name, head, tail, parsed, around, environment)
    return _wrapper(name, verb, tail, parsed, around)


def _counted(around: Around, environment: Callable[[str], str | None]) -> tuple[int | None, int | None, int | None]:
    """World size, nodes, devices per node of a process that no torch launcher starts."""
    if around.parallel:
        per_node = around.tasks_per_node or quotient(around.tasks, around.nodes)
        world = around.tasks if around.tasks is not None else product(around.nodes, per_node)
        return world, around.nodes or quotient(world, per_node), per_node
    text = environment("WORLD_SIZE")
    if text is None:
        return 1, 1, 1
    world = integer(text)
    per_node = integer(environment("LOCAL_WORLD_SIZE"))
    nodes = quotient(world, per_node)
    return world, nodes or (1 if world == 1 else None), per_node or (1 if world == 1 else None)


def _python(
    words: list[Text], around: Around, environment: Callable[[str], str | None], opaque: Callable[[str], bool]
) -> Entry | Inside | None:
    pos = 1
    while pos < len(words):
        text = words[pos].text
        if text in ("-m", "-c") or re.fullmatch(r"-[a-zA-Z]*[mc]", text):
            break
        if text in ("-W", "-X", "--check-hash-based-pycs"):
            pos += 2
        elif re.fullmatch(r"-[bBdEhiIOPqRsStuvVx]+|-[WX].+|--help|--version", text) or (
            opaque(text) and pos + 1 < len(words) and words[pos + 1].text.endswith(".py")
        ):
            pos += 1
        else:
            break
    if pos >= len(words) or words[pos].text == "-":
        return Inside("python", tuple(words[pos + 1 :]), around)
    text = words[pos].text
    python = tuple(word.text for word in words[:pos])
    if text.endswith("c") and text.startswith("-"):
        code = words[pos + 1] if pos + 1 < len(words) else None
        return Inside("python", tuple(words[pos + 2 :]), around, code=code)
    if text.startswith("-") and text.endswith("m"):
        if pos + 1 >= len(words):
            return Inside("none", (), around)
        module = words[pos + 1].text
        if module in _TORCH_MODULES:
            rest = words[pos + 2 :]
            try:
                parsed = parse_options(LAUNCHERS["torchrun"], [word.text for word in rest], opaque)
            except UnknownOption as option:
                raise Refused(f"{module} has an option that is not known here ({MARK.sub('?', str(option))})") from None
            return _torchrun(
                f"python -m {module}",
                rest[: parsed.used],
                rest[parsed.used :],
                parsed,
                around,
                environment,
                opaque,
                python=python,
            )
        if module in ("deepspeed", "deepspeed.launcher.runner", "accelerate.commands.launch"):
            inner = (
                [Text("deepspeed"), *words[pos + 2 :]]
                if "deepspeed" in module
                else [Text("accelerate"), Text("launch"), *words[pos + 2 :]]
            )
            return unwrap(inner, around, environment, opaque)
        if module in _NOT_ENTRIES:
            return Inside("none", (), around)
        entry, argv, python = words[pos + 1], words[pos + 2 :], (*python, "-m")
    else:
        entry, argv = words[pos], words[pos + 1 :]
    world, nodes, devices = _counted(around, environment)
    return Entry(around.launcher or "python", around.argv, python, entry, tuple(argv), world, nodes, devices)


def _torchrun(
    name: str,
    head: list[Text],
    tail: list[Text],
    parsed: Parsed,
    around: Around,
    environment: Callable[[str], str | None],
    opaque: Callable[[str], bool],
    python: tuple[str, ...],
) -> Entry | Inside:
    if not tail:
        return Inside("none", (), around)
    hidden = "?" in parsed.flags
    default = None if hidden else "1"
    nodes_text, devices_text = (
        parsed.last(option) if option in parsed.found else environment(variable) or default
        for option, variable in (("nnodes", "PET_NNODES"), ("nproc_per_node", "PET_NPROC_PER_NODE"))
    )
    nodes, devices = integer(nodes_text), integer(devices_text)
    low, colon, high = (nodes_text or "").partition(":")
    if colon and low == high:
        nodes = integer(low)
    if nodes is None and around.parallel and around.tasks_per_node in (None, 1) and not colon:
        nodes = around.nodes
    entry, argv = tail[0], tail[1:]
    if re.fullmatch(r"[\d:.]*", entry.text):
        raise Refused(f"{name} would take {entry.text!r} for the training script")
    module = parsed.flags & {"m", "module", "no_python", "run_path"}
    named = module or re.search(r"\.py|/", entry.text) or opaque(entry.text)
    if not named and any(word.text.endswith(".py") for word in argv):
        raise Refused(f"{name} would take {entry.text!r} for the training script")
    if "no_python" in parsed.flags:
        return Inside(
            "words",
            tuple(tail),
            Around(name, tuple(head), nodes, product(nodes, devices), devices, devices, parallel=True),
        )
    return Entry(name, tuple(head), python, entry, tuple(argv), product(nodes, devices), nodes, devices)


def _other_launcher(name: str, head: list[Text], tail: list[Text], parsed: Parsed, around: Around) -> Entry | Inside:
    if not tail:
        return Inside("none", (), around)
    if name == "deepspeed":
        nodes, devices = integer(parsed.last("num_nodes")), integer(parsed.last("num_gpus"))
        include = parsed.last("include", "i")
        if include and not MARK.search(include):
            hosts = include.split("@")
            counts = {len(host.partition(":")[2].split(",")) if ":" in host else None for host in hosts}
            nodes, devices = len(hosts), counts.pop() if len(counts) == 1 else None
        elif nodes is None and not parsed.found.keys() & {"hostfile", "H"} and devices is not None:
            nodes = 1
        world = product(nodes, devices)
    elif name == "msrun":
        world, devices = integer(parsed.last("worker_num")), integer(parsed.last("local_worker_num"))
        nodes = quotient(world, devices)
    else:
        world, nodes = integer(parsed.last("num_processes")), integer(parsed.last("num_machines"))
        nodes = 1 if nodes is None and world is not None and "config_file" not in parsed.found else nodes
        devices = quotient(world, nodes)
    launcher = "accelerate launch" if name == "accelerate" else name
    if "no_python" in parsed.flags:
        return Inside(
            "words", tuple(tail), Around(launcher, tuple(head), nodes, world, devices, devices, parallel=True)
        )
    argv = [word for word in tail[1:] if not (name == "deepspeed" and re.fullmatch(r"--local_rank=\$\w+", word.text))]
    return Entry(launcher, tuple(head), (), tail[0], tuple(argv), world, nodes, devices)


def _slurm(name: str, words: list[Text], head: list[Text], tail: list[Text], parsed: Parsed, around: Around) -> Inside:
    made = slurm_around(parsed, around)
    if name == "sbatch":
        wrap = parsed.last("wrap")
        if wrap is not None:
            return Inside("code", (), replace(made, slurm=True), code=Text(wrap, words[0].where), batch=True)
        if not tail:
            return Inside("stdin", (), replace(made, slurm=True), batch=True)
        return Inside("script", tuple(tail), replace(made, slurm=True), batch=True)
    if "multi_prog" in parsed.flags:
        raise Refused("srun --multi-prog reads its commands from a file")
    tasks, per_node = made.tasks, made.tasks_per_node
    if tasks is None and per_node is None and made.nodes is not None:
        tasks, per_node = made.nodes, 1
    made = replace(
        made, launcher="srun", argv=tuple(head), tasks=tasks, tasks_per_node=per_node, parallel=True, slurm=True
    )
    env = []
    exported = parsed.last("export")
    for item in (exported or "").split(","):
        key, equals, value = item.partition("=")
        if equals:
            env.append((key, Text(value, words[0].where)))
    return Inside("words", tuple(tail), made, tuple(env))


def _mpi(
    name: str,
    head: list[Text],
    tail: list[Text],
    parsed: Parsed,
    around: Around,
    environment: Callable[[str], str | None],
) -> Inside:
    env: list[tuple[str, Text]] = []
    for item in parsed.found.get("x", []) + parsed.found.get("genv", []) + parsed.found.get("env", []):
        key, equals, value = item.partition("=")
        if equals:
            env.append((key, Text(value, head[0].where if head else "")))
    tasks = integer(parsed.last("np", "n", "c"))
    per_node = integer(parsed.last("npernode", "N", "ppn", "perhost"))
    by = re.search(r"ppr:(\d+):node", parsed.last("map_by") or "")
    per_node = int(by.group(1)) if by else per_node
    hosts = parsed.last("H", "host", "hosts")
    nodes = None
    if hosts and not MARK.search(hosts):
        nodes = len({host.partition(":")[0] for host in hosts.split(",")})
        slots = {integer(host.partition(":")[2]) for host in hosts.split(",")}
        per_node = per_node or (slots.pop() if len(slots) == 1 else None) or quotient(tasks, nodes)
    nodes = nodes or quotient(tasks, per_node)
    return Inside(
        "words", tuple(tail), Around(name, tuple(head), nodes, tasks, per_node, per_node, parallel=True), tuple(env)
    )


def _wrapper(name: str, verb: str, tail: list[Text], parsed: Parsed, around: Around) -> Inside:
    """Wrappers that run one command in the same way: env, nohup, docker, ssh, nsys, ..."""
    env: list[tuple[str, Text]] = []
    if name in ("docker", "podman", "singularity", "apptainer"):
        for item in parsed.found.get("env", []) + parsed.found.get("e", []):
            key, equals, value = item.partition("=")
            if equals:
                env.append((key, Text(value, tail[0].where if tail else "")))
        tail = tail[1:]
    elif name in ("timeout", "taskset", "enroot"):
        tail = tail[1:]
    elif name in ("env", "sudo"):
        while tail and re.match(r"[A-Za-z_]\w*=", tail[0].text):
            key, _, value = tail[0].text.partition("=")
            env.append((key, Text(value, tail[0].where)))
            tail = tail[1:]
    elif name in ("ssh", "pdsh"):
        tail = tail[1:] if name == "ssh" else tail
        code = " ".join(word.text for word in tail)
        where = tail[0].where if tail else ""
        return Inside("code", (), around, code=Text(code, where)) if code else Inside("none", (), around)
    elif name == "ray" and len(tail) == 1:
        return Inside("code", (), around, code=tail[0])
    del verb
    if not tail:
        return Inside("none", (), around)
    return Inside("words", tuple(tail), around, tuple(env))


_SET = {"e": "errexit", "u": "nounset", "f": "noglob", "a": "allexport", "E": "errtrace", "n": "noexec"}


def _shell(words: list[Text], around: Around) -> Inside:
    """``bash -euo pipefail -c code zero args``, ``bash -x script args``, ``bash -s args < code``."""
    letters = ""
    options: set[str] = set()
    pos = 1
    while pos < len(words):
        text = words[pos].text
        if text == "--":
            pos += 1
            break
        if text in ("--rcfile", "--init-file"):
            pos += 2
            continue
        if re.fullmatch(r"--[a-z-]+", text):
            pos += 1
            continue
        if not re.fullmatch(r"[-+][a-zA-Z]+", text):
            break
        pos += 1
        for letter in text[1:]:
            name = _SET.get(letter, "")
            if letter in "oO" and pos < len(words):
                name = words[pos].text
                pos += 1
            if name:
                (options.add if text[0] == "-" else options.discard)(name)
            letters += letter
    rest, chosen = tuple(words[pos:]), frozenset(options)
    if "c" in letters:
        if not rest:
            return Inside("none", (), around)
        return Inside("code", rest[1:], around, code=rest[0], options=chosen)
    if "s" in letters or not rest:
        return Inside("stdin", rest, around, options=chosen)
    return Inside("script", rest, around, options=chosen)
