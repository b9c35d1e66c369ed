"""``hapmoe runtime verify``: what it launches, how it reads logs, and one verification for real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import builders as b
import pytest
from bench.lab import Case, prepare
from one_host import environment

from hapmoe.errors import InputError
from hapmoe.verifying import compare_logs, jobs

LOG = """ [2026-08-01 10:00:00.000000] iteration        1/     500 | consumed samples:           16 | \
elapsed time per iteration (ms): 872.4 | learning rate: 7.5E-04 | global batch size:    16 | lm loss: 6.549271E+00 | \
seq_load_balancing_loss: 1.144625E+00 | loss scale: 1.0 | grad norm: 0.845 | num zeros: 10112.0 |
 [2026-08-01 10:00:01.000000] iteration        2/     500 | lm loss: 6.487576E+00 | loss scale: 1.0 | grad norm: 0.864 |
"""


def test_logs_are_compared_step_by_step() -> None:
    assert compare_logs(LOG, LOG.replace("6.487576", "6.488000"), "bf16").good
    assert not compare_logs(LOG, LOG.replace("6.487576", "6.488000"), "fp32").good
    # a forgotten scale of 1/2 on one stage of two changes the norm by tens of percent
    found = compare_logs(LOG, LOG.replace("0.864", "0.700"), "bf16")
    assert not found.good and found.norm_error == pytest.approx(0.164 / 0.864)
    assert not compare_logs(LOG, LOG.replace("0.864", "nan"), "bf16").good
    with pytest.raises(InputError, match="steps 1, 2 of the uniform run, none of the other"):
        compare_logs(LOG, "Traceback", "bf16")


def test_all_runs_leave_the_users_checkpoints_alone() -> None:
    job = b.job(argv="--save mine --load mine --save-interval 100 --finetune --lr 1e-4")
    plan = b.plan((4, 4), stages=({"tp": 4}, {"tp": 2, "dp": 2}))
    made = jobs(job, b.plan(tp=1), plan, "weights", 3)
    for name, one in made.items():
        words = [argument.text for argument in one.argv]
        assert "mine" not in words and words[:2] == ["--lr", "1e-4"]
        assert ("--save" in words) == (name == "start") and ("--load" in words) == (name != "start")
    # 128 * lcm(1, 4, 2) rows for all: the uniform plan has tp 1, the other's widest stage tp 4
    divisors = {name: one.argv[-1].text for name, one in made.items()}
    assert divisors == {"start": "512", "uniform": "512", "unequal": "128"}
    assert made["unequal"].model.padded_vocab(4) == made["uniform"].model.padded_vocab(1)


def test_an_unequal_plan_is_verified(tmp_path: Path) -> None:
    """Three launches of the real torchrun; an ssh that stays here stands in for two hosts."""
    flags: dict[str, str | bool | None] = {"--train-iters": "100", "--dist-ckpt-optim-fully-reshardable": None}
    case = Case("verify", (2, 2), mbs=2, meshes=({"dp": 1}, {"dp": 2, "ep": 2}), flags=flags)
    _, _, plan = prepare(case, tmp_path)
    (tmp_path / "plan.json").write_text(
        json.dumps(
            {
                "micro_batch_size": 2,
                "stages": [
                    {"pool": stage.pool, "num_layers": 2, "dp": stage.dp, "ep": stage.ep}
                    | {"micro_batch_size": stage.micro_batch_size}
                    for stage in plan.stages
                ],
            }
        )
    )
    words = [sys.executable, "-m", "hapmoe", "runtime", "verify", "plan.json", "--script", "train.sh"]
    done = subprocess.run(
        [*words, "--cluster", "cluster.yaml", "--json"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout)
    assert found["same"] and found["loss_error"] < 1e-5 and len(found["steps"]) == 3
