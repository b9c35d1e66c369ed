"""Random words, parameter expansions, arithmetic and small programs: the interpreter against real bash."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import pytest
from bash_oracle import run_bash, stand_ins
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hapmoe.errors import InputError
from hapmoe.script import read_script

_EXAMPLES = int(os.environ.get("HAPMOE_EXAMPLES", "40"))
_SETTINGS = settings(
    max_examples=_EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
_PRELUDE = """#!/bin/bash
A=abc; B='x  y'; E=; P=/data/run-7b/tok.model.v2; N=7; L='a:b::c'; Q="it's \\"q\\""; S=' lead trail '; T=aXbXc
ARR=(one "two 2" '' three); declare -A MAP=([k]=v [z w]=2)
set -- p1 "p 2" '' p4
"""


@pytest.fixture(scope="session")
def shims(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_ins(tmp_path_factory.mktemp("shims"))


def _same(text: str, shims: Path) -> None:
    """Equal argument vectors; a refusal is allowed, a wrong vector is not."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        stack.callback(os.chdir, before)
        folder = Path(name)
        script = folder / "t.sh"
        script.write_text(text)
        launches = run_bash(script, (), {}, shims)
        truth = launches[0][2:] if launches else None
        os.chdir(folder)
        try:
            mine = [token.text for token in read_script("t.sh").argv]
        except InputError as error:
            assert truth is None or "differs between versions" in str(error) or "not" in str(error), (str(error), truth)
            if truth is not None and "not a script" not in str(error):
                assert any(word in str(error) for word in ("not known", "not followed", "not clear")), (
                    str(error),
                    truth,
                )
            return
        assert truth is not None, (mine, "bash started nothing")
        assert len(mine) == len(truth), (mine, truth)
        assert [theirs if own is None else own for own, theirs in zip(mine, truth, strict=True)] == truth


_names = st.sampled_from(
    [
        "A",
        "B",
        "E",
        "P",
        "N",
        "L",
        "Q",
        "S",
        "T",
        "U",
        "1",
        "2",
        "3",
        "9",
        "ARR[1]",
        "ARR[0]",
        "MAP[k]",
        "ARR[9]",
    ]
)
_plain = st.sampled_from(
    [
        "a",
        "b",
        "x",
        "X",
        "-",
        "_",
        "/",
        ".",
        "1",
        ":",
        "=",
        ",",
        "@",
        "%",
        "+",
        "#",
    ]
)
_literals = st.lists(_plain, min_size=1, max_size=3).map("".join)
_patterns = st.lists(
    st.sampled_from(
        ["a", "b", "*", "?", "[a-c]", "[!x]", "X", "/", ".", "-", "7", "\\*", '"*"', "'?'", "$A", "${N}", "[[:digit:]]"]
    ),
    min_size=1,
    max_size=3,
).map("".join)


def _expansions(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    value = st.one_of(inner, _literals, st.just(""), st.just("two words"))
    trims = st.tuples(_names, st.sampled_from(["#", "##", "%", "%%"]), _patterns)
    swaps = st.tuples(
        _names, st.sampled_from(["/", "//", "/#", "/%"]), _patterns.filter(lambda p: not p.startswith(("/", "#", "%")))
    )
    return st.one_of(
        _names.map(lambda n: "${" + n + "}"),
        _names.map(lambda n: "${#" + n + "}"),
        st.tuples(_names, st.sampled_from([":-", "-", ":+", "+"]), value).map(lambda t: "${" + "".join(t) + "}"),
        trims.map(lambda t: "${" + "".join(t) + "}"),
        st.tuples(swaps, _literals).map(lambda t: "${" + "".join(t[0]) + "/" + t[1] + "}"),
        swaps.map(lambda t: "${" + "".join(t) + "}"),
        st.tuples(_names, st.integers(-4, 6), st.integers(-3, 5)).map(lambda t: f"${{{t[0]}: {t[1]}:{t[2]}}}"),
        st.tuples(_names, st.integers(-4, 6)).map(lambda t: f"${{{t[0]}: {t[1]}}}"),
        st.tuples(_names, st.sampled_from(["^", "^^", ",", ",,"])).map(lambda t: "${" + "".join(t) + "}"),
        st.sampled_from(
            [
                "$@",
                "$*",
                "$#",
                "${ARR[@]}",
                "${ARR[*]}",
                "${#ARR[@]}",
                "${ARR[@]:1}",
                "${@:2}",
                "${@:2:2}",
                "$N",
                "${MAP[z w]}",
                "${ARR[@]#t}",
                "${ARR[@]/o/0}",
                "${ARR[-1]}",
                "${*:1:1}",
                "${U-$A}",
                "${ARR[@]^}",
            ]
        ),
        inner.map(lambda w: f"$(echo {w})" if "\n" not in w else "x"),
    )


def _words() -> st.SearchStrategy[str]:
    piece = st.one_of(
        _literals,
        st.sampled_from(
            [
                "'q r'",
                '"q r"',
                "\\ ",
                "''",
                '""',
                "\\$",
                "'$A'",
                "$'a\\tb'",
                "\\\\",
                '"\\$A"',
                '"\\\\"',
                "{a,b}",
                "{1..3}",
            ]
        ),
    )
    base = st.lists(piece, min_size=1, max_size=3).map("".join)
    nested = st.recursive(base, lambda inner: _expansions(inner), max_leaves=3)
    part = st.one_of(nested, nested.map(lambda w: f'"{w}"' if "{" in w and '"' not in w and "'" not in w else w))
    return st.lists(part, min_size=1, max_size=3).map("".join)


@_SETTINGS
@given(st.lists(_words(), min_size=1, max_size=6))
def test_words(shims: Path, words: list[str]) -> None:
    _same(_PRELUDE + "torchrun train.py --num-layers 1 " + " ".join(words) + "\n", shims)


@_SETTINGS
@given(st.lists(_words(), min_size=1, max_size=4), st.sampled_from([" ", ":", ":X", " :", "", "/-"]))
def test_words_with_ifs(shims: Path, words: list[str], ifs: str) -> None:
    assigned = "".join(f"V{place}={word}\n" for place, word in enumerate(words) if not word.startswith("~"))
    used = " ".join(f'$V{place} "$V{place}"' for place in range(len(words)))
    _same(_PRELUDE + f"IFS='{ifs}'\n{assigned}torchrun train.py --num-layers 1 {used} {words[0]}\n", shims)


def _arithmetic() -> st.SearchStrategy[str]:
    leaf = st.one_of(
        st.integers(0, 40).map(str),
        st.sampled_from(
            [
                "N",
                "$N",
                "a",
                "b",
                "zero",
                "big",
                "ARR[1]",
                "0x1f",
                "017",
                "2#101",
                "a++",
                "--b",
                "${#A}",
                "u",
                "(a=3)",
                "b+=2",
            ]
        ),
    )

    def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        operators = st.sampled_from(
            [
                "+",
                "-",
                "*",
                "/",
                "%",
                "**",
                "<<",
                ">>",
                "<",
                ">",
                "<=",
                ">=",
                "==",
                "!=",
                "&",
                "|",
                "^",
                "&&",
                "||",
                ",",
            ]
        )
        return st.one_of(
            st.tuples(inner, operators, inner).map(lambda t: f"{t[0]} {t[1]} {t[2]}"),
            inner.map(lambda e: f"({e})"),
            st.tuples(st.sampled_from(["-", "!", "~", "+"]), inner).map(lambda t: f"{t[0]} {t[1]}"),
            st.tuples(inner, inner, inner).map(lambda t: f"{t[0]} ? {t[1]} : {t[2]}"),
        )

    return st.recursive(leaf, grow, max_leaves=6)


@_SETTINGS
@given(st.lists(_arithmetic(), min_size=1, max_size=6))
def test_arithmetic(shims: Path, expressions: list[str]) -> None:
    head = "#!/bin/bash\nA=abc N=7 a=5 b=12 zero=0 big=9223372036854775807; ARR=(3 4)\n"
    lines = "".join(f"R{place}=none\nR{place}=$(({each}))\n" for place, each in enumerate(expressions))
    used = " ".join(f"$R{place}" for place in range(len(expressions)))
    _same(f"{head}{lines}torchrun train.py --num-layers 1 {used} $a $b\n", shims)


def _tests() -> st.SearchStrategy[str]:
    word = st.sampled_from(
        [
            "$A",
            '"$A"',
            "$N",
            '"$E"',
            "$E",
            "abc",
            "7",
            '"a b"',
            "'a*'",
            "$U",
            '"$B"',
            "a*",
            "8",
            '""',
            "x",
        ]
    )
    unary = st.tuples(st.sampled_from(["-z", "-n"]), word).map(" ".join)
    binary = st.tuples(word, st.sampled_from(["=", "!=", "==", "-eq", "-lt", "-ge", "-ne"]), word).map(" ".join)
    return st.one_of(unary, binary, word, st.tuples(st.just("!"), st.one_of(unary, binary)).map(" ".join))


@_SETTINGS
@given(
    st.lists(
        st.tuples(_tests(), st.sampled_from(["[ ", "[[ "]), st.sampled_from(["&&", "||"]), _tests()),
        min_size=1,
        max_size=6,
    )
)
def test_conditions(shims: Path, cases: list[tuple[str, str, str, str],]) -> None:
    lines = []
    for left, opening, joint, right in cases:
        closing = " ]]" if opening == "[[ " else " ]"
        inner = f"{left} {joint} {right}" if opening == "[[ " else left
        lines.append(f"{opening}{inner}{closing}; R+=$?\n")
        lines.append(f"if {opening}{left}{closing} {joint} {opening}{right}{closing}; then R+=y; else R+=n; fi\n")
    head = "#!/bin/bash\nA=abc N=7 E= B='a b' R=r\n"
    _same(f"{head}{''.join(lines)}torchrun train.py --num-layers 1 $R\n", shims)


def _statements() -> st.SearchStrategy[str]:
    word = st.sampled_from(
        [
            "a",
            '"b c"',
            "$X",
            '"$X"',
            "$i",
            '"$@"',
            "$((n+1))",
            "${X:-d}",
            "${#X}",
            "$1",
        ]
    )
    simple = st.one_of(
        word.map(lambda w: f"X={w}"),
        st.sampled_from(["X+=a", "X+=' b'", "X+=$n", 'X+="$1"']),
        word.map(lambda w: f"L+=({w})"),
        st.sampled_from(
            [
                "n=$((n+1))",
                "((n+=2))",
                "shift",
                'set -- "$@" new',
                "true",
                "false",
                "L[n]=at",
                "unset X",
                "f x y",
                "X=$(f q)",
                "read X <<< '1 2'",
                "local_ok=1",
                "break",
                "continue",
                "return 0",
                "X=$(echo a; false)",
                "R+=$?",
                "eval 'X=ev$n'",
            ]
        ),
    )

    def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        body = st.lists(inner, min_size=1, max_size=3).map("\n".join)
        condition = st.sampled_from(
            ["[ $n -gt 2 ]", "[[ $X == a* ]]", "((n % 2))", '[ -n "$X" ]', "true", "f 1", "! false", '[ "$#" -gt 1 ]']
        )
        return st.one_of(
            st.tuples(condition, body, body).map(lambda t: f"if {t[0]}; then\n{t[1]}\nelse\n{t[2]}\nfi"),
            body.map(lambda b: f"for i in 1 2 3; do\n{b}\ndone"),
            body.map(lambda b: f"for ((j=0; j<3; j++)); do\n{b}\ndone"),
            body.map(lambda b: f"k=0; while ((k++ < 3)); do\n{b}\ndone"),
            body.map(lambda b: f"case $X in a*) {b} ;; *) n=$((n+3)) ;; esac"),
            st.tuples(condition, inner).map(lambda t: f"{t[0]} && {{ {t[1]}; }}"),
            st.tuples(condition, inner).map(lambda t: f"{t[0]} || {{ {t[1]}; }}"),
            body.map(lambda b: f"(\n{b}\n)"),
            body.map(lambda b: f'g() {{\nlocal X=in\n{b}\n}}\ng w "v v"'),
        )

    return st.recursive(simple, grow, max_leaves=8)


@_SETTINGS
@given(st.lists(_statements(), min_size=1, max_size=6), st.sampled_from(["", "set -e\n"]))
def test_statements(shims: Path, statements: list[str], first: str) -> None:
    head = "#!/bin/bash\nX=start n=0 R=; L=()\nset -- one 'two 2' three\n"
    head += "f() { X=f$1; n=$((n+1)); echo out$#; [ $n -lt 6 ]; }\n"
    body = "\n".join(statements)
    tail = 'torchrun train.py --num-layers 1 "$X" "$n" "$R" "$#" "$@" "${L[@]}" "${i-unset}"\n'
    _same(f"{head}{first}{body}\n{tail}", shims)
