"""Script -> job: the examples as people run them, origins, credentials, refusals."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import yaml

from hapmoe.backends.megatron import stage_arguments
from hapmoe.clusterfile import load_cluster
from hapmoe.errors import InputError
from hapmoe.extract import extract, extract_document, job_yaml, second_opinion
from hapmoe.job import Argument, JobSpec
from hapmoe.present import present_plan
from hapmoe.script import execute as sandbox
from hapmoe.script.argv import parse_argv
from hapmoe.script.megatron_args import read_arguments
from hapmoe.script.settings import settings_of
from hapmoe.script.values import Token

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.sh"))

MINIMAL = """\
export WANDB_API_KEY=0123456789abcdef
export OMP_NUM_THREADS=4
torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 \\
    --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --vocab-size ${VOCAB:-32000} \\
    --num-experts $EXPERTS --save ckpt-$(date +%s) --wandb-api-key topsecretvalue
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "train.sh"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", SCRIPTS)
def test_examples_read_as_bash_runs_them(name: str, tmp_path: Path) -> None:
    for launcher in ("torchrun", "python"):
        shim = tmp_path / launcher
        shim.write_text('#!/bin/bash\nprintf "%s\\0" "$@" >"$SHIM_OUT"\n')
        shim.chmod(0o755)
    out = tmp_path / "argv"
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SHIM_OUT": str(out)}
    subprocess.run(["bash", EXAMPLES / name], env=env, check=True, cwd=tmp_path)
    words = out.read_text().split("\0")[:-1]
    start = next(n for n, word in enumerate(words) if word.endswith("pretrain_gpt.py"))
    job = extract(EXAMPLES / name)
    assert job.entry == words[start]
    assert len(job.argv) == len(words) - start - 1
    for mine, real in zip(job.argv, words[start + 1 :], strict=True):
        assert mine.text == real or (mine.text is None and "date" in mine.source)


@pytest.mark.parametrize(
    ("name", "shape", "present", "batch"),
    [
        ("mixtral-8x7b", (32, 4096, 8), (1, 4, 8, 32), 256),
        ("deepseek-v3", (61, 7168, 256), (1, 16, 16, 256), 8192),
        ("qwen3-30b-a3b", (48, 2048, 128), (2, 1, 8, 16), 256),
        ("llama2-13b", (40, 5120, 0), (2, 4, 1, 16), 128),
        ("mixtral-s", (24, 4096, 8), (1, 2, 8, 16), 256),
        ("mixtral-l", (48, 6144, 8), (1, 4, 8, 32), 512),
    ],
)
def test_examples(name: str, shape: tuple[int, ...], present: tuple[int, ...], batch: int) -> None:
    job = extract(EXAMPLES / f"{name}.sh")
    moe = job.model.moe
    assert (job.model.num_layers, job.model.hidden, moe.num_experts if moe else 0) == shape
    assert (job.present.tp, job.present.pp, job.present.ep, job.present.world_size) == present
    assert job.training.global_batch_size == batch
    assert job.training.precision == "bf16" and job.training.distributed_optimizer
    assert job.model.vocab_size > 0


def test_origin_and_options(tmp_path: Path) -> None:
    job = extract(write(tmp_path, MINIMAL), env={"EXPERTS": "4"}, imbalance=1.3)
    assert job.name == "train"
    assert job.origin["model.hidden"].endswith("train.sh:3")
    assert job.origin["model.ffn_hidden"].startswith("default")
    assert job.origin["training.imbalance"] == "option --imbalance"
    assert (job.training.imbalance, job.training.global_batch_size) == (1.3, 8)
    assert job.env["OMP_NUM_THREADS"].text == "4"


def test_credentials_are_never_stored(tmp_path: Path) -> None:
    job, document = extract_document(write(tmp_path, MINIMAL), env={"EXPERTS": "4"})
    assert job is not None
    for text in (msgspec.json.encode(job).decode(), job_yaml(job), msgspec.json.encode(document).decode()):
        assert "topsecretvalue" not in text and "0123456789abcdef" not in text
    assert job.env["WANDB_API_KEY"].text is None
    assert any("WANDB_API_KEY" in note for note in job.notes)


def test_refusal_is_a_document_too(tmp_path: Path) -> None:
    script = write(
        tmp_path, "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 8 --load /x --use-checkpoint-args\n"
    )
    job, document = extract_document(script)
    assert job is None
    assert "train.sh:1" in document["refused"] and "--hidden-size" in document["refused"]
    assert document["argv"] == ["--num-layers", "8", "--load", "/x", "--use-checkpoint-args"]
    assert (document["entry"], document["launcher"], document["world_size"]) == ("pretrain_gpt.py", "torchrun", 8)
    with pytest.raises(InputError):
        extract(script)


def test_document(tmp_path: Path) -> None:
    _, document = extract_document(write(tmp_path, MINIMAL), env={"EXPERTS": "4"})
    assert document["refused"] is None
    save = document["argv"][document["argv"].index("--save") + 1]
    assert set(save) == {"unknown"}
    assert document["env"]["OMP_NUM_THREADS"] == "4"


def test_digest_is_of_the_meaning(tmp_path: Path) -> None:
    first = extract(write(tmp_path, MINIMAL), env={"EXPERTS": "4"})
    elsewhere = tmp_path / "other"
    elsewhere.mkdir()
    moved = extract(write(elsewhere, "# a comment\n\n" + MINIMAL), env={"EXPERTS": "4"})
    changed = extract(write(elsewhere, MINIMAL), env={"EXPERTS": "8"})
    assert first.sha256 == moved.sha256 != changed.sha256
    assert len(first.sha256) == 64


@pytest.mark.parametrize("name", SCRIPTS)
def test_job_yaml_is_yaml_and_job_is_json(name: str) -> None:
    job = extract(EXAMPLES / name)
    data = yaml.safe_load(job_yaml(job))
    assert data["model"]["num_layers"] == job.model.num_layers
    words = [word for line in (data["arguments"], data["replaced"]) for entry in line for word in entry]
    assert len(words) == len(job.argv)
    assert msgspec.json.decode(msgspec.json.encode(job), type=JobSpec) == job


@pytest.mark.parametrize("name", SCRIPTS)
def test_round_trip(name: str, tmp_path: Path) -> None:
    """The script's own degrees, emitted again, are the script's arguments: none lost, none changed, users' in order."""
    job = extract(EXAMPLES / name)
    assert job.present.world_size
    cluster_file = tmp_path / "cluster.yaml"
    cluster_file.write_text(
        f"pools:\n  - {{name: a, device: h200-141g-sxm, nodes: {job.present.world_size // 8}, devices_per_node: 8}}\n"
    )
    plan = present_plan(job, load_cluster(cluster_file), world_size=job.present.world_size).plan
    assert plan is not None
    common, stages = stage_arguments(job, plan)
    assert len(set(stages)) == 1
    kept = [word.text for word in job.argv if word.owner == "user"]
    assert [word.text for word in common[: len(kept)]] == kept

    def settings(words: Sequence[Argument]) -> dict[str, object]:
        tokens = [Token(word.text, word.why, word.source) for word in words]
        return {key: setting.value for key, setting in settings_of(parse_argv(tokens)).items()}

    emitted = [*common, *(Argument(text=word) for word in stages[0])]
    before, after = settings(job.argv), settings(emitted)
    # What one release spells in several ways may come back in another; the meaning is read again below.
    respelt = {
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "pipeline_model_parallel_layout",
    }
    respelt |= {
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "recompute_activations",
    }
    respelt |= {"sequence_parallel"} if job.present.tp == 1 else set()  # it has no effect there
    for key, value in before.items():
        assert key in respelt or after[key] == value, key
    again = read_arguments([Token(word.text, word.why, word.source) for word in emitted])
    assert (again.model, again.training) == (job.model, job.training)
    same = ("tp", "cp", "ep", "pp", "micro_batch_size", "sequence_parallel", "recompute")
    assert [getattr(again.present, field) for field in same] == [getattr(job.present, field) for field in same]


def test_program_behind_an_unknown_folder(tmp_path: Path) -> None:
    text = MINIMAL.replace("pretrain_gpt.py", '"$MEGATRON_HOME/$(cat where)/pretrain_gpt.py"')
    job = extract(write(tmp_path, text), env={"EXPERTS": "4"})
    assert job.entry == "pretrain_gpt.py"
    assert any("training program is taken as" in note for note in job.notes)


def test_names_of_jobs(tmp_path: Path) -> None:
    words = ["--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32"]
    assert extract("torchrun", ["pretrain_gpt.py", *words]).name == "training"


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A folder that others may read: as root the sandbox works as nobody, who cannot look into pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


@pytest.mark.parametrize(
    ("text", "agrees"),
    [
        (MINIMAL, True),
        ("srun -N 2 bash -c 'torchrun pretrain_gpt.py --num-layers 3 --x \"a b\"'\n", True),
        ('L=$(python -c "print(2*3)")\ntorchrun pretrain_gpt.py --num-layers $L --x "a b"\n', True),
        (
            "if [ -e /usr/bin/env ]; then L=1; else L=2; fi\ntorchrun a.py --num-workers $L --num-layers 3\n",
            True,
        ),
        ("torchrun pretrain_gpt.py --num-layers 3 --x $(ls /etc/passwd)\n", True),
        ("which torchrun >/dev/null && exit 0\ntorchrun pretrain_gpt.py --num-layers 3\n", False),
    ],
)
def test_second_opinion(text: str, agrees: bool, open_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(open_path)
    opinion = second_opinion(write(open_path, text), env={"EXPERTS": "4"})
    assert opinion["agrees"] == agrees, opinion
    assert "topsecret" not in str(opinion) and "0123456789abcdef" not in str(opinion)


def test_bombs_are_bounded(open_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(open_path)
    monkeypatch.setattr(sandbox, "SECONDS", 2)
    for text in (":(){ :|:& };:\nwait\n", "while :; do :; done\n", "yes > /tmp/x\n"):
        assert not sandbox.execute(write(open_path, text)).launches  # and it comes back


def test_without_bubblewrap_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(InputError, match="apt-get install bubblewrap"):
        second_opinion(write(tmp_path, MINIMAL))
