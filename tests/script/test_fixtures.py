"""Every fixture gives the interpreter what real bash gives the launcher, or is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from bash_oracle import header, run_bash, stand_ins, training_of

from hapmoe.errors import InputError
from hapmoe.script import read_script

FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("*.sh"))


@pytest.fixture(scope="session")
def shims(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_ins(tmp_path_factory.mktemp("shims"))


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: path.stem)
def test_same_as_bash(fixture: Path, tmp_path: Path, shims: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Path(shutil.copy(fixture, tmp_path))
    wanted = header(script.read_text())
    monkeypatch.chdir(tmp_path)
    if wanted.refused:
        with pytest.raises(InputError, match=wanted.refused) as caught:
            read_script(script.name, wanted.args, wanted.env)
        assert caught.value.where
        if "starts no training" in wanted.refused:
            assert training_of(run_bash(script, wanted.args, wanted.env, shims)) is None
        return
    result = read_script(script.name, wanted.args, wanted.env)
    truth = training_of(run_bash(script, wanted.args, wanted.env, shims))
    assert truth is not None, "bash started no training: the fixture is wrong"
    mine = [token.text for token in result.argv]
    assert len(mine) == len(truth), (mine, truth)
    assert [theirs if own is None else own for own, theirs in zip(mine, truth, strict=True)] == truth
    if wanted.world is not None:
        assert result.world_size == wanted.world
    for token in result.argv:
        assert token.text is not None or token.why
