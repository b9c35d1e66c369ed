"""From launcher words to the entry and the number of processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hapmoe.errors import InputError
from hapmoe.script import Invocation, read_script

_PY = "pretrain_gpt.py --num-layers 2"
_CASES: list[tuple[str, str, str, tuple[int | None, int | None, int | None]]] = [
    # launcher lines, reported launcher, entry, (world, nodes, devices per node)
    (f"torchrun --nproc_per 8 --nnode 2 {_PY}", "torchrun", "pretrain_gpt.py", (16, 2, 8)),
    (f"torchrun --nproc-per-node=gpu --nnodes=2:4 {_PY}", "torchrun", "pretrain_gpt.py", (None, None, None)),
    (f"torchrun --nnodes 2:2 --nproc-per-node 4 {_PY}", "torchrun", "pretrain_gpt.py", (8, 2, 4)),
    (f"export PET_NPROC_PER_NODE=8 PET_NNODES=2\ntorchrun {_PY}", "torchrun", "pretrain_gpt.py", (16, 2, 8)),
    (f"torchrun --nnodes $GONE --nproc_per_node 8 {_PY}", "torchrun", "pretrain_gpt.py", (None, None, 8)),
    ("torchrun --nproc-per-node 2 -m megatron.pretrain --num-layers 2", "torchrun", "megatron.pretrain", (2, 1, 2)),
    (
        f"python3.10 -u -m torch.distributed.launch --nproc_per_node=8 --use_env {_PY}",
        "python -m torch.distributed.launch",
        "pretrain_gpt.py",
        (8, 1, 8),
    ),
    (f"export WORLD_SIZE=16 LOCAL_WORLD_SIZE=8\npython {_PY}", "python", "pretrain_gpt.py", (16, 2, 8)),
    (f"#SBATCH -N 4\n#SBATCH --ntasks-per-node=8\nsrun python -u {_PY}", "srun", "pretrain_gpt.py", (32, 4, 8)),
    (f"srun -N2 -n16 --mpi=pmix python {_PY}", "srun", "pretrain_gpt.py", (16, 2, 8)),
    (
        f"#SBATCH --nodes=4\nsrun torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 {_PY} --id $SLURM_NODEID",
        "torchrun",
        "pretrain_gpt.py",
        (32, 4, 8),
    ),
    (f'sbatch -N 2 --wrap "torchrun --nproc_per_node 8 --nnodes 2 {_PY}"', "torchrun", "pretrain_gpt.py", (16, 2, 8)),
    (
        f"sbatch <<EOF\n#!/bin/bash\n#SBATCH -N 2\nsrun --ntasks-per-node 8 python {_PY}\nEOF",
        "srun",
        "pretrain_gpt.py",
        (16, 2, 8),
    ),
    (f'mpirun -np 16 -x A=b --map-by ppr:8:node bash -c "python {_PY}"', "mpirun", "pretrain_gpt.py", (16, 2, 8)),
    (f"mpiexec --envall -n 24 -ppn 12 --cpu-bind depth -d 8 python {_PY}", "mpiexec", "pretrain_gpt.py", (24, 2, 12)),
    (f"mpirun -np 16 -d -N 8 python {_PY}", "mpirun", "pretrain_gpt.py", (16, 2, 8)),
    (f"mpirun -H a:8,b:8 -np 16 python {_PY}", "mpirun", "pretrain_gpt.py", (16, 2, 8)),
    (f"deepspeed --include a:0,1@b:0,1 {_PY}", "deepspeed", "pretrain_gpt.py", (4, 2, 2)),
    (f"deepspeed {_PY}", "deepspeed", "pretrain_gpt.py", (None, None, None)),
    (f"uv run torchrun --nproc_per_node 8 {_PY}", "torchrun", "pretrain_gpt.py", (8, 1, 8)),
    (f"msrun --worker_num=8 --local_worker_num=8 {_PY}", "msrun", "pretrain_gpt.py", (8, 1, 8)),
    (
        f"singularity exec --nv -B /a:/b img.sif python -m torch.distributed.run --nproc_per_node 4 {_PY}",
        "python -m torch.distributed.run",
        "pretrain_gpt.py",
        (4, 1, 4),
    ),
    (
        f'docker run --gpus all img:1 bash -lc "torchrun --nproc_per_node 8 {_PY}"',
        "torchrun",
        "pretrain_gpt.py",
        (8, 1, 8),
    ),
    (
        "#SBATCH -N 2 --ntasks-per-node=8\n#SBATCH hetjob\n#SBATCH -N 1 --ntasks-per-node=4\n"
        f"srun --het-group=0,1 python {_PY}",
        "srun",
        "pretrain_gpt.py",
        (20, 3, None),
    ),
    (f"srun -N 2 -n 16 python {_PY} : -N 1 -n 4 python {_PY}", "srun", "pretrain_gpt.py", (20, 3, None)),
    (f"mpirun -np 8 -H a:8 python {_PY} : -np 8 -H b:8 python {_PY}", "mpirun", "pretrain_gpt.py", (16, 2, 8)),
    (
        "#SBATCH -N 2 --ntasks-per-node=8\n#SBATCH hetjob\n#SBATCH -N 2 --ntasks-per-node=8\n"
        f"srun python {_PY} : python {_PY}",
        "srun",
        "pretrain_gpt.py",
        (32, 4, 8),
    ),
    (
        f"for i in 0 1; do RANK=$i WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 python {_PY} & done; wait",
        "python",
        "pretrain_gpt.py",
        (2, 1, 2),
    ),
]


def _read(folder: Path, text: str) -> Invocation:
    script = folder / "t.sh"
    script.write_text(f"#!/bin/bash\n{text}\n")
    return read_script(script)


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case[0][:40])
def test_unwrapped(case: tuple[str, str, str, tuple[int | None, ...]], tmp_path: Path) -> None:
    text, launcher, entry, sizes = case
    result = _read(tmp_path, text)
    assert result.entry is not None
    assert (result.launcher, result.entry.text) == (launcher, entry)
    assert [token.text for token in result.argv[:2]] == ["--num-layers", "2"]
    assert (result.world_size, result.nodes, result.devices_per_node) == sizes


def test_slurm_sizes_reach_the_arguments(tmp_path: Path) -> None:
    text = "#SBATCH --nodes=4\nGBS=$((SLURM_NNODES * 8))\n"
    result = _read(tmp_path, f"{text}srun torchrun --nnodes 4 --nproc_per_node 8 {_PY} --global-batch-size $GBS")
    assert result.argv[-1].text == "32"
    assert result.unset == ()


@pytest.mark.parametrize(
    "text",
    [
        f"torchrun --surprise 3 {_PY}",
        f"srun --surprise 3 torchrun {_PY}",
        f"torchrun 8 {_PY}",
        f"torchrun node {_PY}",
        f"srun -N 1 python {_PY} : -N 1 python {_PY} --fp16",
        f"$LAUNCH_WITH_$(x) {_PY}",
        "torchrun pretrain_gpt.py --num-layers 2\ntorchrun pretrain_t5.py --num-layers 3",
    ],
)
def test_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        _read(tmp_path, text)
    assert "t.sh" in caught.value.where


def test_what_a_launcher_can_evaluate_again(tmp_path: Path) -> None:
    """A value that another shell would not get by the same text has no source: the launcher asks for it by name.

    The date is evaluated anew; the exit statuses of a finished pipeline, a line split in two, and a value that
    differs between the launches are not.
    """
    script = tmp_path / "t.sh"
    script.write_text(
        "S=$(date +%s)\nfalse | true\nP=${PIPESTATUS[0]}\nread -r A B < <(cat /site/pair)\n"
        'for lr in 1 2; do torchrun pretrain_gpt.py --num-layers 2 --a "$S" --b "p-$P" --c "$B" --lr $lr\ndone\n'
    )
    argv = read_script(script).argv
    assert [(token.text, bool(token.source)) for token in argv[3::2]] == [
        (None, True),
        (None, False),
        (None, False),
        (None, False),
    ]
    assert "differs between the launches" in argv[-1].why
