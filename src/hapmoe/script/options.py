"""Which options a launcher has and how many words each takes: what is needed to find where its command begins."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["LAUNCHERS", "Options", "Parsed", "UnknownOption", "parse_options"]


class UnknownOption(Exception):
    """An option that is not in the table, so that where the command begins is not clear."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one launcher; names without leading dashes, underscores for dashes."""

    values: frozenset[str] = frozenset()
    flags: frozenset[str] = frozenset()
    pairs: frozenset[str] = frozenset()
    numbered: frozenset[str] = frozenset()
    """Flags to one implementation, while another takes a number: ``mpiexec -d 8`` is the depth for PALS and debugs
    Open MPI."""
    short_values: str = ""
    short_flags: str = ""
    abbreviates: bool = False
    single_dash: bool = False
    """Long options may begin with one dash, as in ``mpirun -map-by``."""
    all_take_values: bool = False


@dataclass(slots=True)
class Parsed:
    """Options found (names as in the table), and the words from the first operand on."""

    found: dict[str, list[str]] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)
    used: int = 0

    def last(self, *names: str) -> str | None:
        values = [value for name in names for value in self.found.get(name, [])]
        return values[-1] if values else None


def parse_options(spec: Options, words: list[str], opaque: Callable[[str], bool]) -> Parsed:
    """Read options from the start of ``words``. ``opaque`` says that a word is not known and may be options."""
    parsed = Parsed()
    pos = 0
    while pos < len(words):
        word = words[pos]
        if opaque(word):
            following = words[pos + 1] if pos + 1 < len(words) else ""
            if not (following.startswith("-") or following.endswith(".py") or opaque(following)):
                raise UnknownOption(word)
            pos += 1
            parsed.flags.add("?")
            continue
        if word == "--":
            pos += 1
            break
        if not word.startswith("-") or word == "-":
            break
        pos += _long(spec, parsed, words, pos) if word.startswith("--") else _short(spec, parsed, words, pos)
    parsed.used = pos
    return parsed


def _full(spec: Options, name: str) -> str:
    if name in spec.values or name in spec.flags or name in spec.pairs or not spec.abbreviates:
        return name
    near = [each for each in spec.values | spec.flags if each.startswith(name)]
    return near[0] if len(near) == 1 else name


def _long(spec: Options, parsed: Parsed, words: list[str], pos: int) -> int:
    name, equals, value = words[pos].lstrip("-").partition("=")
    name = _full(spec, name.replace("-", "_"))
    if equals:
        parsed.found.setdefault(name, []).append(value)
        return 1
    if name in spec.numbered and pos + 1 < len(words) and words[pos + 1].isdigit():
        parsed.found.setdefault(name, []).append(words[pos + 1])
        return 2
    if name in spec.flags:
        parsed.flags.add(name)
        return 1
    if name in spec.pairs:
        parsed.found.setdefault(name, []).append("=".join(words[pos + 1 : pos + 3]))
        return 3
    if name in spec.values or spec.all_take_values:
        value = words[pos + 1] if pos + 1 < len(words) else ""
        missing = value.startswith("--")  # its value expanded to nothing; the next option is not its value
        parsed.found.setdefault(name, []).append("" if missing else value)
        return 1 if missing else 2
    raise UnknownOption(words[pos])


def _short(spec: Options, parsed: Parsed, words: list[str], pos: int) -> int:
    body = words[pos][1:]
    if spec.single_dash:
        name = body.partition("=")[0].replace("-", "_")
        if name in spec.values or name in spec.flags or name in spec.pairs:
            return _long(spec, parsed, words, pos)
    while body:
        letter, body = body[0], body[1:]
        if letter in spec.short_values:
            if body:
                parsed.found.setdefault(letter, []).append(body.removeprefix("="))
                return 1
            parsed.found.setdefault(letter, []).append(words[pos + 1] if pos + 1 < len(words) else "")
            return 2
        if letter not in spec.short_flags:
            raise UnknownOption(words[pos])
        parsed.flags.add(letter)
    return 1


def _set(text: str) -> frozenset[str]:
    return frozenset(re.split(r"\s+", text.strip().replace("-", "_"))) - {""}


_TORCHRUN = Options(
    values=_set("""
        nnodes nproc-per-node rdzv-backend rdzv-endpoint rdzv-id rdzv-conf max-restarts monitor-interval
        start-method event-log-handler role log-dir redirects tee local-ranks-filter node-rank master-addr
        master-port local-addr logs-specs numa-binding duplicate-stdout-filters duplicate-stderr-filters
        signals-to-handle
    """),
    flags=_set("""
        standalone no-python run-path use-env module virtual-local-rank shutdown-after-rank-0 help
    """),
    short_values="rt",
    short_flags="mh",
    abbreviates=True,
)
_SRUN = Options(
    values=_set("""
        account acctg-freq begin bell cluster-constraint clusters comment constraint container-image
        container-mounts container-workdir container-name container-env container-save contiguous
        cores-per-socket core-spec cpu-bind cpu-freq cpus-per-gpu cpus-per-task chdir deadline dependency
        distribution epilog error exclude gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket
        gpus-per-task gres gres-flags hint input job-name jobid licenses mem mem-bind mem-per-cpu
        mem-per-gpu mincpus mpi mail-type mail-user network nice nodefile nodelist nodes ntasks
        ntasks-per-core ntasks-per-node ntasks-per-socket ntasks-per-gpu open-mode output partition power
        priority profile prolog qos relative reservation signal slurmd-debug sockets-per-node switches
        task-epilog task-prolog tasks-per-node threads-per-core threads thread-spec time time-min tmp
        tres-per-task uid wait wckey export export-file het-group bcast-exclude wrap array requeue
        environment container-entrypoint-log
    """),
    flags=_set("""
        exclusive overlap label unbuffered pty verbose quiet immediate no-kill kill-on-bad-exit
        oversubscribe overcommit preserve-env container-writable container-readonly container-mount-home
        no-container-mount-home container-remap-root no-container-remap-root no-container-entrypoint
        container-entrypoint multi-prog spread-job use-min-nodes whole disable-status exact propagate
        interactive resv-ports hold parsable test-only no-requeue ignore-pbs nodes-file external no-allocate
    """),
    short_values="NncpAJtoewxGDCqdmirBWSTLMbM",
    short_flags="lukKvQOsXZEHIh",
)
_MPI = Options(
    values=_set("""
        np n c x npernode N ppn perhost H host hosts hostfile machinefile f map-by bind-to rank-by wdir wd
        output-filename prefix genvlist envlist bootstrap iface cpu-bind depth timeout
        report-child-jobs-separately app rankfile rf output path tmpdir stdin launch-agent display gpu-bind
        env_ mem-bind hostlist exclude binding dvm-uri personality pernode_ cpu-set cpu-list slot-list xterm
        ompi-server launcher launcher-exec
    """),
    flags=_set("""
        allow-run-as-root oversubscribe nooversubscribe tag-output timestamp-output merge-stderr-to-stdout v
        q verbose quiet report-bindings genvall envall envnone genvnone display-map display-allocation
        use-hwthread-cpus prepend-rank no-vni line-buffer l pernode report-pid bynode byslot bind-to-core
        bind-to-none bind-to-socket bycore bysocket do-not-launch novm leave-session-attached
        enable-recovery no-transfer d
    """),
    pairs=_set("mca gmca genv env omca pmca prtemca am"),
    numbered=_set("d"),
    short_values="nNcxHf",
    short_flags="vql",
    single_dash=True,
)
_DEEPSPEED = Options(
    values=_set("""
        hostfile include exclude num-nodes num-gpus min-elastic-nodes max-elastic-nodes master-port
        master-addr node-rank launcher launcher-args autotuning bind-core-list ssh-port venv-script
        save-pid-file enable-each-rank-log
    """),
    flags=_set("""
        no-python no-local-rank no-ssh-check force-multi no-ssh module save-pid elastic-training
        bind-cores-to-rank
    """),
    short_values="Hie",
    short_flags="",
)
_ACCELERATE = Options(
    values=_set("""
        config-file num-processes num-machines num-cpu-threads-per-process mixed-precision dynamo-backend
        dynamo-mode machine-rank main-process-ip main-process-port main-training-function rdzv-backend
        rdzv-conf max-restarts monitor-interval tee role log-dir gpu-ids deepspeed-config-file zero-stage
        offload-optimizer-device offload-param-device gradient-accumulation-steps gradient-clipping
        zero3-init-flag zero3-save-16bit-model deepspeed-hostfile deepspeed-multinode-launcher
        deepspeed-exclusion-filter deepspeed-inclusion-filter fsdp-offload-params fsdp-min-num-params
        fsdp-sharding-strategy fsdp-auto-wrap-policy fsdp-transformer-layer-cls-to-wrap
        fsdp-backward-prefetch fsdp-state-dict-type fsdp-version megatron-lm-tp-degree megatron-lm-pp-degree
        megatron-lm-num-micro-batches megatron-lm-sequence-parallelism megatron-lm-recompute-activations
        megatron-lm-use-distributed-optimizer megatron-lm-gradient-clipping same-network
    """),
    flags=_set("""
        cpu multi-gpu use-deepspeed use-fsdp use-megatron-lm debug quiet no-python module tpu mps
        use-mps-device ipex use-xpu dynamo-use-fullgraph dynamo-use-dynamic enable-cpu-affinity
    """),
    short_values="",
    short_flags="mq",
)
_MSRUN = Options(
    values=_set("""
        worker-num local-worker-num master-addr master-port node-rank log-dir join cluster-time-out
        bind-core sim-level sim-rank-id rank-table-file worker-log-name tail-worker-log
    """),
    flags=frozenset(),
)
_DOCKER = Options(
    values=_set("""
        add-host annotation attach blkio-weight cap-add cap-drop cgroup-parent cidfile cpu-shares cpus
        cpuset-cpus cpuset-mems device dns entrypoint env env-file expose gpus group-add health-cmd hostname
        ip ipc label log-driver log-opt memory memory-swap mount name network net pid platform privileged_
        publish pull restart runtime security-opt shm-size stop-signal sysctl tmpfs ulimit user userns uts
        volume volumes-from workdir
    """),
    flags=_set("""
        detach init interactive privileged publish-all read-only rm tty no-healthcheck sig-proxy quiet
    """),
    short_values="acehlmpuvw",
    short_flags="ditPq",
)
_SINGULARITY = Options(
    values=_set("""
        bind home pwd env env-file overlay workdir scratch app network network-args hostname security
        add-caps drop-caps apply-cgroups mount cwd cuda-visible-devices nvccli_ fusemount
    """),
    flags=_set("""
        nv rocm cleanenv contain containall writable writable-tmpfs no-home pid ipc net uts userns fakeroot
        disable-cache keep-privs no-privs nvccli no-mount_ compat no-init silent quiet unsquash no-umask
        no-eval
    """),
    short_values="BHSWo",
    short_flags="cCeifpuw",
)
_NSYS = Options(flags=_set("help"), short_values="tosbcdefghklnpqrwxyz", all_take_values=True)
_SSH = Options(short_values="pilFoLRDbcEeIJmOQSWw", short_flags="1246AaCfGgKkMNnqsTtVvXxYy")
_SMALL = {
    "numactl": Options(
        values=_set("""
        cpunodebind membind physcpubind interleave preferred preferred-many balancing touch
    """),
        flags=_set("localalloc all"),
        short_values="CNmipPw",
        short_flags="la",
    ),
    "timeout": Options(
        values=_set("signal kill-after"),
        flags=_set("foreground preserve-status verbose"),
        short_values="sk",
        short_flags="v",
    ),
    "time": Options(
        values=_set("format output"),
        flags=_set("portability verbose append quiet"),
        short_values="fo",
        short_flags="pvaq",
    ),
    "env": Options(
        values=_set("unset chdir"), flags=_set("ignore-environment null debug"), short_values="uC", short_flags="i0v"
    ),
    "sudo": Options(
        values=_set("user group chdir host prompt"),
        flags=_set("preserve-env set-home non-interactive login stdin"),
        short_values="ugChpD",
        short_flags="EHnAbikPSs",
    ),
    "nice": Options(values=_set("adjustment"), short_values="n", short_flags="0123456789"),
    "ionice": Options(values=_set("class classdata"), short_values="cn", short_flags="t"),
    "taskset": Options(flags=_set("all-tasks cpu-list"), short_flags="ac"),
    "stdbuf": Options(values=_set("input output error"), short_values="ioe"),
    "setsid": Options(flags=_set("ctty fork wait"), short_flags="cfw"),
    "nohup": Options(),
    "command": Options(short_flags="p"),
    "builtin": Options(),
    "unbuffer": Options(short_flags="p"),
    "catchsegv": Options(),
    "uv": Options(
        values=_set("""
        with extra group python directory project env-file package index-url with-requirements
    """),
        flags=_set("""
        no-sync frozen locked active isolated no-project all-extras no-dev offline quiet verbose
    """),
        short_values="p",
        short_flags="qv",
    ),
    "ray": Options(
        values=_set("""
        address working-dir runtime-env runtime-env-json submission-id job-id entrypoint-num-cpus
        entrypoint-num-gpus entrypoint-resources entrypoint-memory metadata-json headers verify log-style
        log-color
    """),
        flags=_set("no-wait verbose"),
        short_flags="v",
    ),
    "conda": Options(
        values=_set("name prefix cwd"),
        flags=_set("no-capture-output live-stream verbose"),
        short_values="np",
        short_flags="v",
    ),
    "pdsh": Options(values=frozenset(), short_values="wfxRlutg", short_flags="SNvab"),
    "enroot": Options(values=_set("mount env conf rc"), flags=_set("root rw"), short_values="mec", short_flags="rw"),
}

LAUNCHERS: dict[str, Options] = {
    "torchrun": _TORCHRUN,
    "srun": _SRUN,
    "sbatch": _SRUN,
    "mpirun": _MPI,
    "mpiexec": _MPI,
    "mpiexec.hydra": _MPI,
    "orterun": _MPI,
    "deepspeed": _DEEPSPEED,
    "accelerate": _ACCELERATE,
    "msrun": _MSRUN,
    "docker": _DOCKER,
    "podman": _DOCKER,
    "singularity": _SINGULARITY,
    "apptainer": _SINGULARITY,
    "nsys": _NSYS,
    "ssh": _SSH,
    **_SMALL,
}
