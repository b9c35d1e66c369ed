"""The emitted files, run with stand-ins: every rank gets what the plan says, and Megatron takes it."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import builders as b
import msgspec
import pytest
from dryrun import Sandbox
from megatron_oracle import config_from, groups, parallel_state, parse

from hapmoe.cluster import Cluster
from hapmoe.errors import InputError
from hapmoe.job import Argument, JobSpec
from hapmoe.launch import target
from hapmoe.launch import write as write_module
from hapmoe.launch.write import write_files
from hapmoe.plan import Plan, Recompute
from hapmoe.resolve import resolve

MIXED = b.cluster(
    b.pool("a100", nodes=1, devices_per_node=4, hosts=("a100-0",)),
    b.pool("h800", nodes=2, devices_per_node=4, hosts=("h800-0", "h800-1")),
)
RECOMPUTE = (
    Recompute(granularity="full", method="uniform", num_layers=1),
    Recompute(),
    Recompute(granularity="selective", modules=("core_attn", "mlp")),
)
PLAN = b.plan((2, 3, 3), pools=("a100", "h800", "h800"), tp=2, dp=2, ep=4, recompute=RECOMPUTE)
ENV = {
    "OMP_NUM_THREADS": Argument(text="1"),
    "TITLE": Argument(text='it\'s a "test" # $HOME'),
    "RUN_STAMP": Argument(text=None, source="$(date +%s%N)", where="train.sh:3"),
    "API_KEY": Argument(text=None, source="API_KEY", why="secret"),
    "MASTER_ADDR": Argument(text="localhost"),
}


def job(argv: str = "--num-layers 8 --bf16 --tensor-model-parallel-size 8") -> JobSpec:
    odd = (
        Argument(text="--title"),
        Argument(text='it\'s\na "$(touch pwned)" `x` # \\ é'),
        Argument(text="--save"),
        Argument(text=None, source='"out/$(date +%s%N)"', where="/home/planner/train.sh:9"),
        Argument(text="--stamp"),
        Argument(text=None, source="$(date +%s%N)", where="train.sh:10"),
        Argument(text="--empty"),
        Argument(text=""),
    )
    made = b.job(argv=argv, env=ENV)
    return msgspec.structs.replace(made, argv=(*made.argv, *odd))


def made(where: Path, given: JobSpec, cluster: Cluster, plan: Plan) -> Path:
    plan = resolve(given, cluster, plan)
    files = target("torchrun")(given, cluster, plan, msgspec.json.encode(plan).decode())
    return write_files(where / "hapmoe-plan", files)


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)


def test_every_rank_is_given_its_arguments(tmp_path: Path, sandbox: Sandbox) -> None:
    """By launch.sh over ssh: unequal stages, odd words, run-varying values the same everywhere."""
    launch = made(tmp_path, job(), MIXED, PLAN)
    run = sandbox.run(launch, "launch.sh", API_KEY="s3cret 'quoted'")
    assert run.code == 0, run.stderr
    assert sorted(run.ranks) == list(range(12))
    assert len({run.argv(rank)[run.argv(rank).index("--save") + 1] for rank in range(12)}) == 1
    assert (
        len({(run.env(rank)["RUN_STAMP"], run.argv(rank)[run.argv(rank).index("--stamp") + 1]) for rank in range(12)})
        == 1
    )
    for rank in range(12):
        argv, env = run.argv(rank), run.env(rank)
        assert argv[argv.index("--title") + 1] == 'it\'s\na "$(touch pwned)" `x` # \\ é'
        assert argv[argv.index("--empty") + 1] == ""
        assert argv[argv.index("--save") + 1].startswith("out/1")
        assert argv.count("--tensor-model-parallel-size") == 1
        assert env["TITLE"] == 'it\'s a "test" # $HOME'
        assert env["API_KEY"] == "s3cret 'quoted'"
        assert env["MASTER_ADDR"] == "a100-0"
        assert env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
        assert run.ranks[rank]["name"] == "__main__"
    text = "".join(path.read_text() for path in launch.rglob("*") if path.is_file())
    assert "s3cret" not in text
    assert "/home/planner" not in text and str(tmp_path) not in text and os.getcwd() not in text


def test_megatron_takes_what_each_rank_is_given(tmp_path: Path, sandbox: Sandbox) -> None:
    launch = made(tmp_path, job(), MIXED, PLAN)
    run = sandbox.run(launch, "launch.sh", API_KEY="x")
    plan = resolve(job(), MIXED, PLAN)
    for rank in range(12):
        args = parse(run.argv(rank))
        config = config_from(args, num_layers=8, hidden_size=256, num_attention_heads=16, num_moe_experts=8)
        with groups(
            12,
            rank,
            tensor_model_parallel_size=args.tensor_model_parallel_size,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        ):
            index = parallel_state.get_pipeline_model_parallel_rank()
            stage = plan.stages[index]
            assert stage.first_rank <= rank < stage.first_rank + stage.num_devices
            assert parallel_state.get_data_parallel_world_size() == stage.dp
            assert config.pipeline_model_parallel_layout.get_num_layers_to_build(pp_rank=index) == stage.num_layers
        assert (config.recompute_granularity or "none") == stage.recompute.granularity
        assert args.micro_batch_size == plan.micro_batch_size and args.global_batch_size == plan.global_batch_size


def test_stages_that_share_a_node(tmp_path: Path, sandbox: Sandbox) -> None:
    cluster = b.cluster(b.pool("a100", nodes=1, devices_per_node=4))
    launch = made(tmp_path, b.job(), cluster, b.plan((3, 5), dp=2, ep=2, recompute=RECOMPUTE[:2]))
    assert (launch / "hosts.tsv").read_text().splitlines()[1] == "0\tCHANGE-ME-a100-0\ta100\t4\t0,1"
    run = sandbox.run(launch, "run_node.sh", NODE_RANK="0", MASTER_ADDR="a", MASTER_PORT="1", STAND_IN_DEVICE="a100")
    assert run.code == 0, run.stderr
    assert ["--recompute-method" in run.argv(rank) for rank in range(4)] == [True, True, False, False]


def test_any_launcher_that_sets_a_rank(tmp_path: Path, sandbox: Sandbox) -> None:
    launch = made(tmp_path, b.job(), MIXED, PLAN)
    slurm = {"SLURM_PROCID": "9", "SLURM_NTASKS": "12", "SLURM_LOCALID": "1"}
    run = sandbox.run(launch, "entry.py", STAND_IN_DEVICE="h800", **slurm)
    assert run.code == 0, run.stderr
    assert run.argv(9)[-3:] == ["--recompute-modules", "core_attn", "mlp"]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "none of RANK, SLURM_PROCID"),
        ({"RANK": "0", "WORLD_SIZE": "8"}, "world size is 8, the plan has 12 ranks"),
        ({"RANK": "12", "WORLD_SIZE": "12"}, "rank 12 is outside the plan's 12 ranks"),
        ({"RANK": "0", "WORLD_SIZE": "12"}, "rank 0 (stage 0) runs on 'Stand-in H800', the plan wants a100 (a100)"),
    ],
)
def test_a_rank_in_the_wrong_place_stops(
    tmp_path: Path, sandbox: Sandbox, variables: dict[str, str], said: str
) -> None:
    launch = made(tmp_path, b.job(), MIXED, PLAN)
    run = sandbox.run(launch, "entry.py", STAND_IN_DEVICE="h800", **variables)
    assert run.code == 2 and not run.ranks
    assert said in run.stderr and len(run.stderr.splitlines()) == 1
    if "runs on" in said:
        assert sandbox.run(launch, "entry.py", HAPMOE_SKIP_DEVICE_CHECK="1", **variables).code == 0


def test_a_missing_trainer_is_one_line(tmp_path: Path, sandbox: Sandbox) -> None:
    launch = made(tmp_path, b.job(), MIXED, PLAN)
    run = sandbox.run(launch, "entry.py", trainer="other.py", STAND_IN_DEVICE="a100", RANK="0", WORLD_SIZE="12")
    assert run.code == 2 and "set HAPMOE_WORKDIR" in run.stderr and "Traceback" not in run.stderr


def test_a_trainer_that_is_a_module(tmp_path: Path, sandbox: Sandbox) -> None:
    given = msgspec.structs.replace(b.job(), entry="train.gpt", entry_is_module=True)
    launch = made(tmp_path, given, MIXED, PLAN)
    (tmp_path / "work" / "train").mkdir(parents=True)
    run = sandbox.run(launch, "entry.py", trainer="train/gpt.py", STAND_IN_DEVICE="a100", RANK="0", WORLD_SIZE="12")
    assert run.code == 0, run.stderr
    assert "--tensor-model-parallel-size" in run.argv(0)


def test_placeholders_are_refused(tmp_path: Path, sandbox: Sandbox) -> None:
    launch = made(tmp_path, b.job(), b.cluster(), b.plan(dp=8, ep=4))
    run = sandbox.run(launch, "launch.sh")
    assert run.code == 2 and "hosts.tsv still says CHANGE-ME-a100-0" in run.stderr


def test_dry_run_shows_every_rank_and_no_secret(tmp_path: Path, sandbox: Sandbox) -> None:
    launch = made(tmp_path, job(), MIXED, PLAN)
    run = sandbox.run(launch, "launch.sh --dry-run", API_KEY="s3cret")
    rows = [msgspec.json.decode(line) for line in run.stdout.splitlines()]
    assert run.code == 0 and [row["rank"] for row in rows] == list(range(12)) and not run.ranks
    assert [row["stage"] for row in rows] == [0] * 4 + [1] * 4 + [2] * 4
    assert "s3cret" not in run.stdout and "${HAPMOE_VAR_0}" in rows[0]["argv"]


def test_run_varying_values_are_asked_for_without_launch_sh(tmp_path: Path, sandbox: Sandbox) -> None:
    launch = made(tmp_path, job(), MIXED, PLAN)
    node = {"NODE_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1", "STAND_IN_DEVICE": "a100"}
    run = sandbox.run(launch, "run_node.sh", **node)
    assert run.code != 0 and "HAPMOE_VAR_0" in run.stderr
    assert sandbox.run(launch, "run_node.sh", **node, HAPMOE_VAR_0="a", HAPMOE_VAR_1="", HAPMOE_VAR_2="c").code == 0
    assert (
        "no node 7 in hosts.tsv"
        in sandbox.run(launch, "run_node.sh", HAPMOE_DRY_RUN="1", **{**node, "NODE_RANK": "7"}).stderr
    )


def test_credentials_are_asked_for_by_name(tmp_path: Path, sandbox: Sandbox) -> None:
    """Values that the extraction left out (they stood in the script) come from the environment."""
    secret = Argument(text=None, why="a credential", where="/home/planner/train.sh:7")
    made_job = msgspec.structs.replace(
        b.job(), argv=(Argument(text="--wandb-api-key"), secret), env={"HF_TOKEN": secret}
    )
    launch = made(tmp_path, made_job, MIXED, PLAN)
    missing = sandbox.run(launch, "launch.sh")
    assert missing.code != 0 and "WANDB_API_KEY: export it: a credential train.sh:7" in missing.stderr
    run = sandbox.run(launch, "launch.sh", WANDB_API_KEY="one", HF_TOKEN="two")
    assert run.code == 0, run.stderr
    assert run.argv(5)[:2] == ["--wandb-api-key", "one"] and run.env(5)["HF_TOKEN"] == "two"


def test_device_names_match_at_word_ends(tmp_path: Path, sandbox: Sandbox) -> None:
    kind = b.device("h800", runtime_names=("stand-in h20",))
    cluster = b.cluster(b.pool("h800", device=kind, devices_per_node=1))
    launch = made(tmp_path, b.job(), cluster, b.plan(pools=("h800",)))
    assert sandbox.run(launch, "entry.py", RANK="0", WORLD_SIZE="1", STAND_IN_DEVICE="h20").code == 0
    assert sandbox.run(launch, "entry.py", RANK="0", WORLD_SIZE="1", STAND_IN_DEVICE="h200").code == 2


def test_a_plan_that_was_not_copied_whole_is_one_line(tmp_path: Path, sandbox: Sandbox) -> None:
    launch = made(tmp_path, b.job(), MIXED, PLAN)
    (launch / "plan.json").write_text((launch / "plan.json").read_text()[:300])
    cut = sandbox.run(launch, "entry.py", RANK="0", WORLD_SIZE="12", STAND_IN_DEVICE="a100")
    assert cut.code == 2 and len(cut.stderr.splitlines()) == 1
    assert cut.stderr.startswith("hapmoe entry: plan.json cannot be read (")


def test_mixed_vendors_get_files_that_stop_with_the_reason(tmp_path: Path, sandbox: Sandbox) -> None:
    cluster = b.cluster(b.pool("h800"), b.pool("ascend"), links=(("h800", "ascend"),))
    launch = made(tmp_path, b.job(), cluster, b.plan((4, 4), pools=("h800", "ascend"), dp=8, ep=4))
    said = "Megatron-LM upstream cannot join nccl and hccl in one job"
    node = {"NODE_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for command in ("run_node.sh", "launch.sh"):
        run = sandbox.run(launch, command, **node)
        assert run.code == 2 and said in run.stderr and not run.ranks
    dry = sandbox.run(launch, "run_node.sh", HAPMOE_DRY_RUN="1", **node)
    assert dry.code == 0 and len(dry.stdout.splitlines()) == 8
    assert said in (launch / "README.txt").read_text()


def alive(path: Path) -> bool:
    """Is the process whose id the file holds still there (zombies are not)?"""
    try:
        return Path(f"/proc/{path.read_text().strip()}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def test_one_failing_node_ends_the_run(tmp_path: Path, sandbox: Sandbox) -> None:
    """One node fails at once; the others, which would run for a minute, are stopped."""
    launch = made(tmp_path, b.job(), MIXED, PLAN)
    script = (
        '#!/bin/bash\n[ "$NODE_RANK" = 1 ] && sleep 0.5 && exit 7\necho $$ > "$HOME/pid$NODE_RANK"; exec sleep 60\n'
    )
    (tmp_path / "bin" / "torchrun").write_text(script)
    run = sandbox.run(launch, "launch.sh")
    assert run.code == 7
    pids = list(tmp_path.glob("pid*"))
    assert len(pids) == 2
    assert within(10, lambda: not any(map(alive, pids)))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_the_launcher(tmp_path: Path, sandbox: Sandbox, how: signal.Signals) -> None:
    launch = made(tmp_path, b.job(), MIXED, PLAN)
    (tmp_path / "bin" / "torchrun").write_text('#!/bin/bash\necho $$ > "$HOME/pid$NODE_RANK"; exec sleep 60\n')
    env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path), "HAPMOE_CHECK": "off"}
    running = subprocess.Popen([launch / "launch.sh"], cwd=tmp_path, env=env, stderr=subprocess.DEVNULL)
    pids = [tmp_path / f"pid{node}" for node in range(3)]
    assert within(20, lambda: all(path.exists() and alive(path) for path in pids))
    running.send_signal(how)
    assert running.wait(20) in (130, -signal.SIGKILL)
    assert within(10, lambda: not any(map(alive, pids)))


def test_torchrun_itself_numbers_ranks_as_the_plan_does(tmp_path: Path, sandbox: Sandbox) -> None:
    """Real torchrun, three agents on this machine, nodes of unequal size: two stages share the first."""
    cluster = b.cluster(
        b.pool("a100", nodes=1, devices_per_node=2, hosts=("a100-0",)),
        b.pool("h800", nodes=1, devices_per_node=1, hosts=("h800-0",)),
    )
    plan = b.plan((2, 3, 3), pools=("a100", "a100", "h800"), recompute=RECOMPUTE)
    launch = made(tmp_path, b.job(), cluster, plan)
    (tmp_path / "bin" / "torchrun").write_text(
        f'#!/bin/bash\nunset PYTHONPATH\nexec {sys.executable} -m torch.distributed.run "$@"\n'
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    skip = {"HAPMOE_SKIP_DEVICE_CHECK": "1"}
    run = sandbox.run(launch, "launch.sh", HAPMOE_MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **skip)
    assert run.code == 0, run.stderr
    assert sorted(run.ranks) == [0, 1, 2]
    for rank, (node, stage) in enumerate(((0, 0), (0, 1), (1, 2))):
        assert run.env(rank)["NODE_RANK"] == str(node)
        args = parse(run.argv(rank))
        assert (args.recompute_granularity or "none") == RECOMPUTE[stage].granularity


@pytest.mark.parametrize("cluster", [MIXED, b.cluster(b.pool("h800"), b.pool("ascend"), links=(("h800", "ascend"),))])
def test_shell_is_clean(tmp_path: Path, cluster: Cluster) -> None:
    plan = PLAN if cluster is MIXED else b.plan((4, 4), pools=("h800", "ascend"), dp=8, ep=4)
    launch = made(tmp_path, job(), cluster, plan)
    scripts = [launch / "launch.sh", launch / "run_node.sh"]
    beside = Path(sys.executable).with_name("shellcheck")
    shellcheck = beside if beside.exists() else "shellcheck"
    done = subprocess.run([shellcheck, *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert all(os.access(path, os.X_OK) for path in scripts)
    assert not re.search(r"\n\n\n", "".join(path.read_text() for path in scripts))


def test_files_are_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"plan.json": '{"schema": 1, "stages": []}', "args/common.args": "new"}
    folder = write_files(tmp_path / "out", {**files, "args/common.args": "old"})
    assert write_files(tmp_path / "out", files, force=True) == folder
    assert (folder / "args" / "common.args").read_text() == "new"

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(write_module.os, "fsync", full)
    with pytest.raises(InputError, match="No space left on device") as caught:
        write_files(tmp_path / "out", {**files, "args/common.args": "newer"}, force=True)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError):
        write_files(tmp_path / "other", files)
    assert (folder / "args" / "common.args").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    files = {"plan.json": '{"schema": 1, "stages": []}'}
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    assert write_files(foreign, files) == foreign  # empty
    with pytest.raises(InputError, match="--force replaces it"):
        write_files(foreign, files)
    (foreign / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds 'notes.txt', which hapmoe did not write"):
        write_files(foreign, files, force=True)
    (foreign / "plan.json").write_text("{}")
    with pytest.raises(InputError, match="not a plan of hapmoe"):
        write_files(foreign, files, force=True)
    with pytest.raises(InputError, match="not a folder"):
        write_files(foreign / "notes.txt", files)
    with pytest.raises(InputError, match="cannot write"):
        write_files(foreign / "notes.txt" / "under", files)


def test_targets_by_name() -> None:
    with pytest.raises(InputError, match="one of torchrun"):
        target("cron")
