"""What is no usable script is refused in one clear line, quickly, and nothing of a secret is shown."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from bash_oracle import BASH

from hapmoe.errors import InputError
from hapmoe.script import read_command, read_script

_TRAIN = "torchrun pretrain_gpt.py --num-layers 2\n"
_BAD: dict[str, bytes] = {
    "empty": b"",
    "blank": b"\n\n  \n",
    "comments only": b"#!/bin/bash\n# nothing\n",
    "binary": b"#!/bin/bash\n\0\1\2",
    "not utf-8": b"#!/bin/bash\necho \xff\xfe\n",
    "crlf": b"#!/bin/bash\r\necho x\r\n",
    "python": b"#!/usr/bin/env python\nprint(1)\n",
    "launches nothing": b"echo hi\n",
    "fork bomb": b":(){ :|:& };:\n",
    "recursion": b"f(){ f; }; f\n",
    "recursion in substitutions": b"f(){ g $(f); }; f\n",
    "endless loop": b"while true; do X=$((X+1)); done\n",
    "endless empty loop": b"while :; do :; done\n",
    "endless for": b"for ((;;)); do X+=aaaaaaaaaaaaaaaaaaaaaaaaaaaa; done\n",
    "growing value": b"X=aaaaaaaa; while true; do X=$X$X; done\n",
    "4 MB": b"echo aaaaaaaaaa\n" * 270_000,
    "positionals that double": b'while :; do set -- "$@" $* x $*; done\n',
    "pattern on a growing value": b"while :; do X=$X--; Y=${X%%*-}; done\n",
    "deep substitutions": b"$(" * 500 + b"echo" + b")" * 500,
    "deep groups": b"{ " * 1000 + b"echo;" + b" }" * 1000,
    "deep ifs": b"if true; then " * 2000,
    "deep defaults": b"echo " + b"${a:-" * 2000 + b"}" * 2000,
    "deep conditions": b"[[ " + b"( " * 3000 + b"a" + b" )" * 3000 + b" ]]",
    "deep negation": b"[[ " + b"! " * 5000 + b"a ]]",
    "deep arithmetic": b"x=$((" + b"-" * 5000 + b"1))\n",
    "long chain": b"true" + b" && true" * 5000 + b"\n",
    "brace bomb": b"echo " + b"{a,b}" * 30 + b"\n",
    "brace range": b"for i in {1..100000000}; do :; done\n",
    "nested loops": b"for a in {1..99}; do for b in {1..99}; do for c in {1..99}; do :; done; done; done\n",
    "sources itself": b"source ./t.sh\n",
    "starts itself": b"bash ./t.sh\n",
    "submits itself": b"sbatch $0\n",
    "slow regular expression": b"[[ aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa! =~ ^(a+)+$ ]]\n",
    "slow pattern": b"X=" + b"a" * 2000 + b"; case $X in *a*a*a*a*a*a*a*a*b) ;; esac\n",
    "wide printf": b'printf -v X "%*d" 999999999 1\n',
    "huge index": b"A[999999999999]=1\n",
    "huge power": b'python -c "print(9**9**9**9)"\n',
    "many repetitions": b'X=$(printf "%0900d" 0)!; [[ $X =~ 0*0*0*0*0*1 ]]\n',
    "extended alternatives": b"case " + b"0" * 900 + b" in *(0|00|0*0)*1) ;; esac\n",
    "replacement that multiplies": b"X=" + b"0" * 9000 + b"; Y=${X//0/$X$X}\n",
    "a word of many values": b"X=" + b"0" * 9000 + b'; Y="' + b"$X" * 20000 + b'"\n',
    "template that multiplies": b"export X=" + b"0" * 9000 + b"; Y=$(echo '" + b"$X" * 9000 + b"' | envsubst)\n",
    "python that multiplies": b"X=$(python3 -c \"print('a' * 10**9)\"); Y=${X?}; "
    b'torchrun x.py --num-layers $(python3 -c "print(sum([1 for i in range(10**9)]))") $X\n',
    "sed that multiplies": b"X=$(echo a | sed '"
    + b"s/a/aa/g;" * 45
    + b"'); torchrun pretrain_gpt.py --num-layers 2 $X\n",
    "an alias": b"shopt -s expand_aliases\nalias torchrun=echo\ntorchrun pretrain_gpt.py --num-layers 2\n",
    "more words than Linux takes": b"torchrun pretrain_gpt.py --num-layers 2" + b" a" * 300_000 + b"\n",
    "a coprocess": b"coproc { cat; }\n" + _TRAIN.encode(),
    "a trap that acts on every command": b"trap shift DEBUG\n" + _TRAIN.encode(),
    "open quote": b'echo "abc\n',
    "open single quote": b"echo 'abc\n",
    "open array": b"A=(1 2\n",
    "open expansion": b"echo ${a\n",
    "bad expansion": b"echo ${}\n",
    "stray parenthesis": b")\n",
    "stray operator": b"&& x\n",
    "private-use characters": "echo \U000f0001\n".encode(),
    "eval of unknown text": b'eval "$(curl x)"\n' + _TRAIN.encode(),
    "unknown names": b"export $(cat /nowhere/.env)\n" + _TRAIN.encode(),
    "unknown arguments": b"A=$(cat /nowhere/args)\ntorchrun pretrain_gpt.py --num-layers 2 $A\n",
    "unknown launcher": b"mylaunch pretrain_gpt.py --num-layers 2\n",
    "unknown launcher option": b"torchrun --surprise 3 pretrain_gpt.py --num-layers 2\n",
    "placeholder": b"CKPT=<Specify path>\n" + _TRAIN.encode(),
    "placeholder in launch": b"torchrun pretrain_gpt.py --num-layers 2 --data-path <path>\n",
    "missing argument in a condition": b'if [ "$1" = moe ]; then X=1; fi\n' + _TRAIN.encode(),
    "missing inner script": b"bash run_inner.sh --num-layers 4\n",
}


@pytest.mark.parametrize("name", _BAD)
def test_refused_quickly(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.sh").write_bytes(_BAD[name])
    began = time.process_time()
    with pytest.raises(InputError) as caught:
        read_script("t.sh")
    assert time.process_time() - began < 30  # a guard against hanging, not a benchmark
    assert "\n" not in str(caught.value)
    assert caught.value.where
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("for i in a; do\ndone", False),
        ("for i in a; do\n# left out\ndone", False),
        ("while false; do\ndone", False),
        ("while\ndo :; done", False),
        ("if true; then\nfi", False),
        ("if true; then :; elif true; then\nfi", False),
        ("if true; then :; else\nfi", False),
        ("(\n)", False),
        ("{\n}", False),
        ("f() { }", False),
        ("f() {\n# nothing\n}", False),
        ("f()\necho a", False),
        ("function f\necho a", False),
        ("f() g() { :; }", False),
        ("X=$(for i in a; do\ndone)", False),
        ("X=$( ) Y=`` Z=$(# nothing\n)", True),
        ("case a in a) ;; b)\nesac", True),
        ("for i in; do :; done", True),
        ("f() (:)", True),
        ("f() if true; then :; fi", True),
        ("f() { :; } > /dev/null", True),
        ("function f { :\n}", True),
    ],
)
def test_commands_that_are_missing(text: str, right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body without a command is an error in bash, which `bash -n` tells too."""
    assert (subprocess.run([BASH, "-n", "-c", text], capture_output=True, check=False).returncode == 0) == right
    monkeypatch.chdir(tmp_path)
    Path("t.sh").write_text(f"{text}\n{_TRAIN}")
    if right:
        assert len(read_script("t.sh").argv) == 2
        return
    with pytest.raises(InputError, match=r"syntax error|compound command"):
        read_script("t.sh")


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_script(tmp_path / "none.sh")
    with pytest.raises(InputError, match="folder"):
        read_script(tmp_path)


def test_many_flags(tmp_path: Path) -> None:
    script = tmp_path / "t.sh"
    flags = "".join(f"  --flag{i} {i} \\\n" for i in range(10_000))
    script.write_text("torchrun pretrain_gpt.py --num-layers 2 \\\n" + flags + "\n")
    assert len(read_script(script).argv) == 20_002


def test_two_megabytes(tmp_path: Path) -> None:
    """Read, in bounded time, whatever it is made of."""
    script = tmp_path / "t.sh"
    flags = "".join(f"  --flag{i} {i} \\\n" for i in range(95_000))
    exports = "".join(f"export VARIABLE{i}=value{i}\n" for i in range(20_000))
    for text, words in ((f"{_TRAIN[:-1]} \\\n{flags}\n", 190_002), (f"{exports}{'# comment' * 150_000}\n{_TRAIN}", 2)):
        script.write_text(text)
        assert 1_500_000 < len(text) < 2_500_000
        began = time.process_time()
        assert len(read_script(script).argv) == words
        assert time.process_time() - began < 15


def test_ten_thousand_appends(tmp_path: Path) -> None:
    script = tmp_path / "t.sh"
    appended = "".join(f"A+=(--flag{i} {i})\n" for i in range(10_000))
    script.write_text(f'A=()\n{appended}torchrun pretrain_gpt.py --num-layers 2 "${{A[@]}}"\n')
    assert len(read_script(script).argv) == 20_002


def test_many_unknown_conditions(tmp_path: Path) -> None:
    script = tmp_path / "t.sh"
    script.write_text("".join(f"if [ -d /x{i} ]; then A{i}=1; else B=2; fi\n" for i in range(300)) + _TRAIN)
    assert [token.text for token in read_script(script).argv] == ["--num-layers", "2"]


@pytest.mark.parametrize(
    "text",
    [
        "export WANDB_API_KEY=topsecret\n",
        "HF_TOKEN='topsecret'\nexport HF_TOKEN X=\"$HF_TOKEN\"\n",
        "export MY_PASSWORD=topsecret; export COPY=a-$MY_PASSWORD-b\n",
        "export https_proxy=http://user:topsecret@proxy:80\n",
        "K=topsecret\nexport AWS_SECRET_ACCESS_KEY=$K\nunset K\n",
        'if [ "$WANDB_API_KEY" = topsecret ]; then :; fi\n',
        'ARGS="--wandb-api-key topsecret"\n',
        "ARGS='--hf-token=topsecret'\n",
        "ARGS='--url https://me:topsecret@host/x'\n",
        "export MYSQL_PWD=topsecret\n",
        "ARGS='--kubeconfig-token topsecret --db-password topsecret --passphrase topsecret'\n",
        "export SIGNED='https://host/x?X-Signature=topsecret&y=1'\n",
        'export HEADER="Authorization: Bearer topsecret1"\n',
        "export HOOK=https://hooks.slack.com/services/T0/B0/topsecret\n",
        "export COPY=glpat-topsecret12\n",
        "export DB_KEY=0topsecret123\nARGS='--note x=0topsecret123'\n",
        "export X=$(echo $WANDB_API_KEY | cut -c1-20)\n",
        'declare -A E=([API_KEY]=topsecret)\nARGS="--a ${E[API_KEY]}"\n',
        'declare -A E=(API_KEY topsecret)\nARGS="--a ${E[API_KEY]}"\n',
        'declare -A E; E[MY_TOKEN]=topsecret; ARGS="--a ${E[MY_TOKEN]}"\n',
        'AUTH_TOKEN=([1]=topsecret); ARGS="--a ${AUTH_TOKEN[1]}"\n',
        "read -ra AUTH_TOKEN <<< 'topsecret b'; ARGS=\"--a $AUTH_TOKEN\"\n",
        'mapfile -t AUTH_TOKEN <<< topsecret; ARGS="--a $AUTH_TOKEN"\n',
        "trap 'ARGS=\"--a $WANDB_API_KEY\"' ERR; false\n",
    ],
)
def test_secrets_are_not_shown(text: str, tmp_path: Path) -> None:
    script = tmp_path / "t.sh"
    launch = "torchrun pretrain_gpt.py --num-layers 2 $ARGS --key $WANDB_API_KEY --t $DB_PASSWD\n"
    script.write_text(f"{text}export DB_PASSWD=topsecret\n{launch}")
    result = read_script(script, env={"WANDB_API_KEY": "topsecret"})
    assert "topsecret" not in repr(result)
    assert any(token.text is None for token in result.argv)


@pytest.mark.parametrize(
    "text",
    [
        "eval \"$(curl -H 'Authorization: Bearer topsecret1' https://me:topsecret@host/x)\"\n",
        "export API_KEY=0topsecret123\nsource ./0topsecret123\n",
        "source https://host/x?token=topsecret\n",
    ],
)
def test_secrets_are_not_in_messages(text: str, tmp_path: Path) -> None:
    script = tmp_path / "t.sh"
    script.write_text(text + _TRAIN)
    with pytest.raises(InputError) as caught:
        read_script(script)
    assert "topsecret" not in str(caught.value)


def test_names_that_only_look_secret(tmp_path: Path) -> None:
    script = tmp_path / "t.sh"
    script.write_text(
        "TRAIN_TOKENS=5\nTOKENIZER_TYPE=GPT2\nkey=3\n"
        "torchrun pretrain_gpt.py --num-layers $key --a $TRAIN_TOKENS --tokenizer-type $TOKENIZER_TYPE"
        " --moe-token-dispatcher-type alltoall --num-key-value-heads 4\n"
    )
    assert all(token.text is not None for token in read_script(script).argv)


def test_command() -> None:
    words = ["torchrun", "--nnodes=2", "--nproc_per_node", "8", "pretrain_gpt.py"]
    words += ["--num-layers", "4", "--x", "a b; $HOME"]
    result = read_command(words)
    assert [token.text for token in result.argv] == words[5:]
    assert (result.world_size, result.nodes, result.devices_per_node) == (16, 2, 8)
    assert result.entry is not None
    assert result.entry.text == "pretrain_gpt.py"
    with pytest.raises(InputError):
        read_command([])


def test_where_and_unset_and_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.sh").write_text(
        '#!/bin/bash\nL=24\nexport OMP_NUM_THREADS=1\nexport SITE\nARGS=(\n  --num-layers $L\n  --x "$GONE"\n)\n'
        'NCCL_DEBUG=INFO torchrun pretrain_gpt.py "${ARGS[@]}" --save /c/$(date +%s)\n'
    )
    result = read_script("train.sh", env={"SITE": "s", "CALLER": "c"})
    assert [(t.text, t.where) for t in result.argv[:2]] == [("--num-layers", "train.sh:6"), ("24", "train.sh:2")]
    assert result.unset == ("GONE (train.sh:7)",)
    env = [(name, token.text) for name, token in result.env]
    assert env == [("OMP_NUM_THREADS", "1"), ("SITE", "s"), ("NCCL_DEBUG", "INFO")]
    assert result.where == "train.sh:9"
    assert result.argv[-1].source == '"/c/$(date +%s)"'
