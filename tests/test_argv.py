"""Argument vectors cut into flags and values, as argparse does it; layer patterns, as Python does it."""

from __future__ import annotations

import argparse

import pytest
from argv_words import SHAPE, tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from hapmoe.errors import HapmoeError, InputError
from hapmoe.script.argv import own, parse_argv
from hapmoe.script.arity import ARITY
from hapmoe.script.flags import BY_NAME, FLAGS, arity_of, find_flag
from hapmoe.script.layer_pattern import read_pattern
from hapmoe.script.megatron_args import read_arguments
from hapmoe.script.values import Token


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ValueError(message)


_ARGPARSE = ["--bf16", "--num-layers", "--data-path", "--recompute-granularity", "--cp-comm-type", "--lr", "--save"]
_WORDS = [*_ARGPARSE, "4", "-4", "-.5", "0.3", "/a", "a b", "--num-layers=8", "--save=", "--data-path=x", "-", "full"]


@given(st.lists(st.sampled_from(_WORDS), max_size=14))
@settings(max_examples=500, deadline=None)
def test_words_belong_where_argparse_puts_them(words: list[str]) -> None:
    parser = _Parser(allow_abbrev=False, add_help=False)
    for name in _ARGPARSE:
        arity = arity_of(name)
        if arity == 0:
            parser.add_argument(name, action="store_true", default=None)
        else:
            parser.add_argument(name, nargs=None if arity == 1 else arity)
    try:
        expected = vars(parser.parse_args(words))
    except ValueError:
        return  # what Megatron itself refuses is looked at elsewhere
    found = {}
    for each in parse_argv([Token(word) for word in words]):
        values = [value.text for value in each.values]
        arity = arity_of(each.name)
        found[each.name[2:].replace("-", "_")] = True if arity == 0 else values[0] if arity == 1 else values
    assert found == {key: value for key, value in expected.items() if value is not None}


@pytest.mark.parametrize(
    "text",
    [
        "([0]*3+[1]*58)",
        "([1]*3+[0]*1)*3",
        "[0,1]*4",
        "2*[1]",
        "[]",
        "[1,]",
        "3",
        "(2)",
        "[1]+[0]*2+[1]",
        "[1+1*0,0]*2",
        "((([1])))",
    ],
)
def test_pattern_is_what_python_makes_of_it(text: str) -> None:
    value = eval(text)
    assert read_pattern(text, flag="--f") == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    "text",
    [
        "'[1]'",
        "[1] * 3",
        "[1",
        "1]",
        "[[1]]",
        "[1]*[2]",
        "[1]+2",
        "",
        "+",
        "a",
        "__import__",
        "[1],[2]",
        "()",
        "(1,2)",
        "9**9",
        "[1]*99999999",
        "9" * 5 + "*" + "9" * 9,
        "(" * 500 + "1",
    ],
)
def test_pattern_refuses(text: str) -> None:
    with pytest.raises(InputError):
        read_pattern(text, flag="--moe-layer-freq", where="t.sh:1")


@given(st.text("0123456789[](),+*", max_size=40))
@settings(max_examples=300, deadline=None)
def test_pattern_never_crashes(text: str) -> None:
    try:
        value = read_pattern(text, flag="--f")
    except InputError:
        return
    assert isinstance(value, int) or all(isinstance(entry, int) for entry in value)


def test_flags_are_told_from_values_as_argparse_does() -> None:
    found = parse_argv(
        tokens("--lr -1e-4 --min-lr -.5 --data-path 0.3 /a 0.7 /b --bf16 --foo 1 2 --bar=x --swiglu stray")
    )
    assert [(each.name, [value.text for value in each.values]) for each in found] == [
        # -1e-4 is no number to argparse before 3.14, so Megatron stops there; it is not swallowed either.
        ("--lr", []),
        ("-1e-4", []),
        ("--min-lr", ["-.5"]),
        ("--data-path", ["0.3", "/a", "0.7", "/b"]),
        ("--bf16", []),
        ("--foo", ["1", "2"]),
        ("--bar", ["x"]),
        ("--swiglu", []),
        ("", ["stray"]),
    ]


def test_table_is_consistent() -> None:
    names = [name for flag in FLAGS for name in flag.names]
    assert len(names) == len(set(names))
    for flag in FLAGS:
        first = flag.names[0]
        if first in ARITY and first not in ("--num-experts", "--recompute-modules"):
            assert ARITY[first] == flag.arity, first
    assert find_flag("--override-opt_param-scheduler") == (None, "--override-opt_param-scheduler")


_USER = [
    "--swiglu",
    "--lr 1e-4",
    "--data-path 0.5 /a 0.5 /b",
    "--unknown-flag",
    "--unknown-list 1 2 3",
    "--save=/x",
    "--bf16",
    "--num-experts 8",
    "--global-batch-size 64",
    "--log-interval 1",
    "--moe-token-dispatcher-type alltoall",
]
_PLAN = [
    "--tensor-model-parallel-size 2",
    "--pipeline-model-parallel-size=2",
    "--recompute-modules moe mlp",
    "--batch-size 1",
    "--sequence-parallel",
    "--recompute-granularity selective",
    "--expert-model-parallel-size 4",
    "--context_parallel_size 2",
    "--expert-tensor-parallel-size 1",
    "--num-layers-per-virtual-pipeline-stage 2",
    "--recompute-activations",
]


@given(st.lists(st.sampled_from([(text, "user") for text in _USER] + [(text, "plan") for text in _PLAN]), max_size=15))
@settings(max_examples=200, deadline=None)
def test_words_keep_order_and_owner(parts: list[tuple[str, str]]) -> None:
    """Dropping what the plan owns and appending it again is all that emission does: nothing else may move."""
    argv = tokens(" ".join(text for text, _ in parts))
    words = own(argv, parse_argv(argv))
    assert [word.text for word in words] == [token.text for token in argv]
    for owner in ("user", "plan"):
        expected = [word for text, whose in parts if whose == owner for word in text.split()]
        assert [word.text for word in words if word.owner == owner] == expected


_ODD = ["--foo", "-x", "1", "-1", "0.5", "a b", "", "--", "true", "?", "--a=b", "[1]*8"]


@given(st.lists(st.sampled_from([*BY_NAME, *_ODD]), max_size=12))
@settings(max_examples=400, deadline=None)
def test_nothing_but_our_own_errors(words: list[str]) -> None:
    argv = (*tokens(SHAPE), *(Token(None if word == "?" else word, "why", "", "t.sh:1") for word in words))
    try:
        got = read_arguments(argv)
    except HapmoeError as error:
        assert "\n" not in str(error)
        return
    assert [word.text for word in got.argv] == [token.text for token in argv]
