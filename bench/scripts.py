"""Generated launch scripts, read by the interpreter and run by real bash: never a silent difference.

``python -m bench.scripts [--count N] [--seed N] [--json]`` prints how many were equal, refused and different, how
many start no training in either, and the time a script takes to read; the exit code is 1 when any reading was silently
wrong. 20,000 is a night's worth.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from hapmoe.errors import InputError
from hapmoe.script import read_script

__all__ = ["differences", "generate"]

# Launchers as functions of the shell that runs the script: they write down their words and start nothing.
_STAND_INS = r"""
torchrun() { printf '%s\0' "$@" > "$RECORD/$((RECORDED++)).$BASHPID"; }
site() {
  printf '%s\n' "$SITE_SAYS"
  (( (SITE_CALLS++ + SITE_STATUS) % 3 )) && return $SITE_STATUS; return $((! SITE_STATUS))
}
export -f torchrun site
"""
# What `site`, a program that only a run would tell of, says and how it ends; a reading must hold for all of them.
_SITES = (("abc", "0"), ("p1", "1"), ("two words", "0"), ("", "1"))
_HEAD = """#!/bin/bash
A=abc; B='x  y'; E=; P=/data/run-7b/tok.model; N=7; Q="it's"; S=' lead trail '
ARR=(one "two 2" '' three); declare -A MAP=([k]=v [w]="2 3")
f() { X=f$1; n=$((n+1)); echo "out$#"; }
g() { local X=in; local -a L2=("$@"); R+="${L2[*]}"; f "$@" > /dev/null; return $(( $# % 2 )); }
X=start n=0 R=r L=(); set -- p1 "p 2" p3
"""
_TAIL = 'torchrun train.py --num-layers 1 "$X" "$n" "$R" "$#" "$@" "${L[@]}" "${MAP[k]}" "${V-unset}" "${i-unset}"\n'


class _Writer:
    """Statements drawn at random, nested a few levels deep."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.files = 0
        self.site = seed % 3 == 2

    def pick(self, *choices: str) -> str:
        return self.random.choice(choices)

    def draw(self, *choices: Callable[[], str]) -> str:
        """One of ``choices``, the only one that is made."""
        return self.random.choice(choices)()

    def number(self) -> str:
        return self.pick("0", "1", "2", "3", "7", "12", "$n", "$N", "${#A}", "$#", "n", "${#ARR[@]}")

    def arithmetic(self, depth: int = 2) -> str:
        if depth == 0 or self.random.random() < 0.3:
            return self.number()
        left, right = self.arithmetic(depth - 1), self.arithmetic(depth - 1)
        form = self.random.random()
        if form < 0.15:
            return f"({left} > {right} ? {left} : {right})"
        return f"({left} {self.pick('+', '-', '*', '%', '/', '<<', '==', '<', '&&', '||', '|')} {right})"

    def expansion(self) -> str:
        name = self.pick("A", "B", "E", "P", "N", "Q", "S", "X", "U", "1", "2", "9", "ARR[1]", "MAP[w]", "V", "R")
        pattern = self.pick("*", "a*", "?", "*/", "/*", ".*", "[a-c]", "x", "*-", "${A}", '"*"')
        return self.draw(
            lambda: f"${{{name}}}",
            lambda: f"${{#{name}}}",
            lambda: f"${{{name}:-{self.pick('d', '$A', 'two words', '')}}}",
            lambda: f"${{{name}-$N}}",
            lambda: f"${{{name}:+{self.pick('yes', '$A', 'a b')}}}",
            lambda: f"${{{name}#{pattern}}}",
            lambda: f"${{{name}##{pattern}}}",
            lambda: f"${{{name}%{pattern}}}",
            lambda: f"${{{name}%%{pattern}}}",
            lambda: f"${{{name}//{self.pick('a', '/', '[0-9]', ' ')}/{self.pick('b', '-', '')}}}",
            lambda: f"${{{name}/{self.pick('a', 'x', '#a', '%c')}/Z}}",
            lambda: f"${{{name}: {self.pick('0', '1', '-2')}:{self.pick('1', '2', '3')}}}",
            lambda: f"${{{name}{self.pick('^', '^^', ',', ',,')}}}",
        )

    def word(self) -> str:
        return self.draw(
            lambda: "a",
            lambda: "'q r'",
            lambda: '"b c"',
            lambda: "$X",
            lambda: '"$X"',
            lambda: "$i",
            lambda: '"$@"',
            lambda: "$*",
            lambda: '"$*"',
            lambda: "${ARR[@]}",
            lambda: '"${ARR[@]}"',
            lambda: '"${ARR[*]}"',
            lambda: '"${ARR[@]:1:2}"',
            lambda: "${!MAP[@]}",
            lambda: f"$(({self.arithmetic()}))",
            lambda: self.expansion(),
            lambda: f'"{self.expansion()}"',
            lambda: f'"-{self.expansion()}-$n"',
            lambda: f"--f={self.expansion()}",
            lambda: "$(echo a  b)",
            lambda: '"$(printf "%s-" a b)"',
            lambda: "`echo $n`",
            lambda: "{a,b}$n",
            lambda: "{1..3}",
            lambda: "\\$x",
            lambda: "$'t\\tb'",
            lambda: '"$(f 1 2)"',
            lambda: "$?",
        )

    def words(self) -> str:
        return " ".join(self.word() for _ in range(self.random.randint(1, 3)))

    def condition(self) -> str:
        left, right = self.pick('"$X"', '"$A"', '"$E"', '"$1"', '"$U"'), self.pick("abc", '"$A"', '""', "p1", "fz")
        return self.draw(
            lambda: f"[ {left} = {right} ]",
            lambda: f"[ {left} != {right} ]",
            lambda: f"[[ {left} == {self.pick('a*', '[f-z]*', '?', '*1')} ]]",
            lambda: f"[[ {left} =~ ^([a-z]+)(.*)$ ]]",
            lambda: f"[[ -z {left} || -n {right} && $n -lt 4 ]]",
            lambda: f"[ $n -{self.pick('gt', 'lt', 'ge', 'eq')} {self.pick('0', '1', '3')} ]",
            lambda: f"(({self.arithmetic()}))",
            lambda: "[[ -v MAP[k] ]]",
            lambda: '[ -n "$U" ]',
            lambda: "true",
            lambda: "false",
            lambda: "! false",
            lambda: "g a b",
            lambda: "f 1 >/dev/null",
            lambda: 'grep -q b <<< "$X"',
        )

    def unknown(self) -> str:
        """A statement that depends on a program of the site."""
        simple = self.pick(
            "X=s", 'R+="$X"', "n=$((n+1))", "V=v", "L+=(s)", "shift", "return", "break", "continue", "exit"
        )
        other = self.pick("X=o", "V=", "n=$((n*2))", "false", "R+=o")
        answer, pattern = self.pick("abc", "p1", '""'), self.pick("a*", "p?", '""')
        return self.draw(
            lambda: "X=$(site)",
            lambda: 'V="a-$(site)"',
            lambda: f"site && {simple}",
            lambda: f"site || {simple}",
            lambda: f"site && {simple} || {other}",
            lambda: f"site a || {other} && {simple}",
            lambda: f"X=$(site); V=${{X:{self.pick('-', '+')}$({self.pick('false', 'f q', 'site')})}}; R+=$?",
            lambda: f"if site; then {simple}; else {self.simple()}\nfi",
            lambda: f"if ! site a; then {self.simple()}\n{simple}; fi",
            lambda: f'if [ "$(site)" = {answer} ]; then {simple}; fi',
            lambda: f"[[ -z $(site) ]] && {simple}",
            lambda: f"case $(site) in {pattern}) {simple} ;; *) {self.simple()}\n;; esac",
            lambda: f"for i in $(site); do {simple}; done",
            lambda: f"while site; do {simple}; done",
            lambda: f"until site; do {simple}; done",
            lambda: "read X V < <(site)",
            lambda: f"site | while read -r l; do {simple}; done",
            lambda: f"n=$(( $(site | wc -w) {self.pick('+', '*')} 2 ))",
            lambda: "L=($(site))",
            lambda: "site > out; X=$(< out)",
            lambda: f"s() {{ {simple}; site; }}; s; R+=$?",
            lambda: "X=${X:-$(site)}",
            lambda: 'Y=$(site); R+=${Y:+y}; [ -n "$Y" ] || V=e',
        )

    def simple(self) -> str:
        self.files += 1
        name = f"file{self.files}"
        value = self.pick("a", "$n", '"$1"', "' b'", '"$X"', "new", '"a b"')
        line = self.pick("'1 2 3'", '"$B"', '"$X"', "'a,b c,,d'")
        key = self.pick("k", "w", "$1", "new key")
        evaluated = self.pick("X=ev$n", 'X="$A b"', "X=${X}", "n=$((n+1))")
        piped = self.pick("tr a-z A-Z", "sed 's/a/b/'", "cut -c1-3", "head -1", "wc -w", "grep -o a", "cat -")
        last = self.pick("false", "true", "exit 3")
        edit = self.pick(
            "sed -e 's/a/1/' -e 's/1/2/'",
            "sed -n '2p;$p'",
            "sed '/a/d;1!s/./Z/g'",
            "awk '{print $2,$1}'",
            "sort -u",
            "xargs",
            "paste -sd,",
            "tac",
            "rev",
            "grep -n a",
            "wc -l",
        )
        regex = self.pick("^([a-z]+)(.*)$", "([a-c]|ab)+", "(x?)(a*)$", "[0-9]+.?")
        search = self.pick("-n a", "-c a", "-w b", "-o [a-c]*", "-v a", "-x a")
        replaced = self.pick("a|ab", "[a-z]*", "(.)(.)", "x?")
        calculation = self.pick("print(2*3, [1]*2)", "print('a'*$N)", "n=4; print(n//3, f'x{n}')", "print(max(1,$N)/2)")
        return self.draw(
            lambda: f"X={self.word()}",
            lambda: f'k() {{ local X=$X-in V=$X; local -a L=("${{L[@]}}" {value}); R+=$X$V${{#L[@]}}; }}; k',
            lambda: f"X=$(printf '%s\\n' {self.words()} | {edit})",
            lambda: f"printf '%s\\n' {self.words()} > {name}; while read -r -u 4 l; do R+=$l; done 4< {name}",
            lambda: f"mapfile -t -s 1 -n {self.pick('1', '2')} L < <(printf '%s\\n' {self.words()})",
            lambda: f"read -n {self.pick('1', '2')} X <<< {line}",
            lambda: f"X=$( {{ echo {value}; echo err >&2; }} {self.pick('2>&1', '2>/dev/null', '2>&1 >/dev/null')} )",
            lambda: f'V=$(python3 -c "{calculation}")',
            lambda: f"X=$(expr {self.pick('1', '$n')} {self.pick('+', '-', '=')} {self.pick('2', '$N')})",
            lambda: f"echo {value} > {name}; {self.pick('cp', 'mv')} {name} {name}.b; X=$(< {name}.b)",
            lambda: f"shopt -s nocasematch; case {value} in A|P1) X=m ;; esac; shopt -u nocasematch",
            lambda: "shopt -s lastpipe; echo l$n | read X; shopt -u lastpipe",
            lambda: f"X+={value}",
            lambda: f"V={self.expansion()}",
            lambda: f"L+=({self.words()})",
            lambda: f"L=({self.words()})",
            lambda: f"ARR[{self.pick('1', '5', '$n', '-1')}]={value}",
            lambda: f"MAP[{key}]={value}",
            lambda: f"n=$(({self.arithmetic()}))",
            lambda: f"((n {self.pick('+=', '-=', '=')} {self.arithmetic(1)}))",
            lambda: "shift",
            lambda: f'set -- "$@" {self.words()}',
            lambda: f"f {self.words()}",
            lambda: f"g {self.words()}; R+=$?",
            lambda: "X=$(f q)",
            lambda: f"read X V <<< {line}",
            lambda: f"IFS=, read -ra L <<< {line}",
            lambda: f"printf -v V '%s|%03d' {value} {self.pick('5', '12')}",
            lambda: f"eval '{evaluated}'",
            lambda: f'eval "V={self.pick("$n", "$A", "x")}"',
            lambda: f"X=$(cat <<END\nline {self.expansion()}\nEND\n)",
            lambda: f"cat > {name} <<'END'\nX=src$n\nL+=(\"$@\")\nEND\nsource ./{name} {self.pick('', 'arg', value)}",
            lambda: f"while read -r a b; do L+=(\"$b$a\"); done < <(printf '%s\\n' '1 x y' {value})",
            lambda: f"mapfile -t L < <(echo {self.words()})",
            lambda: 'unset "ARR[1]"',
            lambda: "unset V",
            lambda: f"declare -n ref={self.pick('X', 'V', 'R')}; ref+=z; unset -n ref",
            lambda: f'X=$(echo "$X" | {piped})',
            lambda: f"X=$(bash -c 'echo \"$1-$#\"' _ {self.words()})",
            lambda: "R+=$?",
            lambda: "V=${V:-d}",
            lambda: f"trap 'R+=t$?' {self.pick('ERR', 'ERR', 'EXIT')}",
            lambda: "trap - ERR",
            lambda: f"[[ $X$'\\n'{value} =~ {regex} ]] && R+=${{BASH_REMATCH[0]}}${{#BASH_REMATCH[@]}}",
            lambda: 'L=("${L[@]/' + self.pick("#/p", "%/q", "a/b", "/a/") + '}")',
            lambda: 'L=("${L[@]:' + self.pick("1", " -1", "0:2") + '}"); R+=${#L[@]}',
            lambda: 'X=${X@Q}; V="${*@U}"',
            lambda: f"printf -v X '%q %s' {value}",
            lambda: f"mapfile -d {self.pick(',', 'a', '1')} L <<< {line}",
            lambda: (
                f"while getopts {self.pick(':ab:', 'ab:')} o -a -b {value} -c; do R+=$o${{OPTARG-}}; done; OPTIND=1"
            ),
            lambda: f"m() {{ local -n to=$1; to+={value}; }}; m {self.pick('X', 'V', 'ARR[1]')}",
            lambda: f"case $X in a*) R+=1 ;;& *{self.pick('1', 'b', 'c')}) R+=2 ;& z) R+=3 ;; *) R+=4 ;; esac",
            lambda: f"(exit {self.pick('0', '3')}); f $?; R+=$?",
            lambda: f"X=$(printf '%s\\n' {self.words()} | grep {search})",
            lambda: f"X=$(sed -E 's/{replaced}/[&]/{self.pick('', 'g', '2')}' <<< {line})",
            lambda: f'X=$(head -n {self.pick("-1", "2")} <<< "$X"; tail -n {self.pick("+2", "1")} <<< {line})',
            lambda: 'eval "R+=\\$?"; X="$(g x y; echo $?)"',
            lambda: f"declare -A D=({value} {value} k $n); R+=${{D[k]}}${{#D[@]}}",
            lambda: "V=${FUNCNAME[0]-top}",
            lambda: ': "${U:=set}"; unset U',
            lambda: "break",
            lambda: "continue",
            lambda: f"X=$(echo a; {last})",
            lambda: f"X=$({last}; echo a$?; g x; echo b; ({last}); echo c)",
            lambda: f"shopt -{self.pick('s', 'u')} inherit_errexit; X=$({last}; echo a) || X=d",
            lambda: f"read X V < <(echo a; {last}; echo b)",
            lambda: f"{self.pick('true', 'false')} {self.pick('&&', '||')} R+=c",
            lambda: f"echo {self.words()} > {name}; X=$(< {name})",
            lambda: f'eval "L=($(getopt -q -o ab: --long cc:,dd -- -b {value} --c={value} -a {value} --dd))"; R+=$?',
            lambda: f"V=$(awk 'BEGIN {{ printf \"%.{self.pick('0', '2')}f\", '$n' * 2.5 }}')",
            lambda: f"L=($(seq -f {self.pick('%02g', 'p%g.bin')} {self.pick('1', '2 2')} 4))",
            lambda: f"{{ echo {value}; echo two; }} > {name}; read X < {name}",
        )

    def block(self, depth: int) -> str:
        return "\n".join(self.statement(depth - 1) for _ in range(self.random.randint(1, 3)))

    def statement(self, depth: int = 3) -> str:
        if self.site and self.random.random() < 0.25:
            return self.unknown()
        if depth <= 0 or self.random.random() < 0.55:
            return self.simple()
        body, other = self.block(depth), self.block(depth)
        subject, pattern = self.pick("$X", '"$A"', "$n"), self.pick("a*", "[0-9]", "st*|f?")
        made: list[Callable[[], str]] = [
            lambda: f"if {self.condition()}; then\n{body}\nelse\n{other}\nfi",
            lambda: f"if {self.condition()}; then\n{body}\nelif {self.condition()}; then\n{other}\nfi",
            lambda: f"for i in {self.words()}; do\n{body}\ndone",
            lambda: f"for ((j=0; j<{self.pick('0', '2', '3')}; j++)); do\n{body}\ndone",
            lambda: f"k=0; while ((k++ < 3)); do\n{body}\ndone",
            lambda: f"k=0; until [ $((k+=1)) -gt 2 ]; do\n{body}\ndone",
            lambda: f"case {subject} in\n{pattern})\n{body}\n;;\n*)\n{other}\n;;\nesac",
            lambda: f"{self.condition()} && {{\n{body}\n}}",
            lambda: f"{self.condition()} || {{\n{body}\n}}",
            lambda: f"(\n{body}\n)",
            lambda: f'h() {{\nlocal V=in\n{body}\n}}\nh w "v v"',
            lambda: f"{{\n{body}\n}} > /dev/null",
            lambda: f"while read -r line; do\n{body}\nR+=$line\ndone <<< $'l1\\nl2'",
        ]
        return self.random.choice(made)()


def generate(seed: int) -> str:
    """One script; the same seed gives the same script."""
    writer = _Writer(seed)
    first = writer.pick("", "", "set -e\n", "set -o pipefail\n")
    statements = "\n".join(writer.statement() for _ in range(writer.random.randint(2, 7)))
    return f"{_HEAD}{first}{statements}\n{_TAIL}"


def _truth(script: Path, folder: Path, site: tuple[str, str] = _SITES[0]) -> list[str] | None:
    """What bash hands to the launcher; None when it starts nothing."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        work, record = Path(name, "work"), Path(name, "record")
        work.mkdir()
        record.mkdir()
        env = {
            "PATH": os.defpath,
            "BASH_ENV": str(folder / "stand-ins"),
            "RECORD": str(record),
            "SITE_SAYS": site[0],
            "SITE_STATUS": site[1],
            "HOME": "/home/nobody",
            "LC_ALL": "C.UTF-8",
        }
        (work / script.name).write_bytes(script.read_bytes())
        command = ["timeout", "-k", "1", "3", "bash", script.name]
        run = subprocess.run(command, cwd=work, env=env, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if run.returncode in (124, 137):
            raise TimeoutError
        found = sorted(record.iterdir())
        return found[-1].read_bytes().decode(errors="replace").split("\0")[1:-1] if found else None


def differences(seeds: range) -> Iterator[tuple[int, str, float, str]]:
    """For each seed ``(seed, kind, seconds, what)``; kind is equal, neither (nor bash nor the reading starts a
    training), refused, different, or endless (in bash)."""
    before = Path.cwd()
    for seed in seeds:
        with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
            stack.callback(os.chdir, before)
            folder = Path(name)
            script = folder / "t.sh"
            script.write_text(generate(seed))
            (folder / "stand-ins").write_text(_STAND_INS)
            os.chdir(folder)
            began = time.perf_counter()
            mine: list[str | None] | None
            try:
                mine, why = [token.text for token in read_script("t.sh").argv], ""
            except InputError as error:
                mine, why = None, str(error)
            seconds = time.perf_counter() - began
            if mine is None:
                kind = "refused"
                if "starts no training" in why:
                    kind, why = _none(script, folder, why)
                yield seed, kind, seconds, why
                continue
            kind, what = "equal", ""
            for site in _SITES if "site" in script.read_text() else _SITES[:1]:
                try:
                    truth = _truth(script, folder, site)
                except TimeoutError:
                    kind = "endless"
                    break
                if truth is None and re.search(r"site|err >&2|sort -u", script.read_text()):
                    continue  # this way the script ends before it trains; the order of sort depends on the locale
                if truth is None or not _equal(mine, truth):
                    kind, what = "different", f"read {mine}\n bash {truth} with {site}"
                    break
            yield seed, kind, seconds, what


def _none(script: Path, folder: Path, why: str) -> tuple[str, str]:
    """Whether bash starts nothing either, whatever the site says."""
    for site in _SITES if "site" in script.read_text() else _SITES[:1]:
        try:
            if _truth(script, folder, site) is not None:
                return "refused", f"{why}; but bash does with {site}"
        except TimeoutError:
            return "endless", ""
    return "neither", ""


def _equal(mine: list[str | None], truth: list[str]) -> bool:
    return len(mine) == len(truth) and all(own is None or own == real for own, real in zip(mine, truth, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    kinds: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    times: list[float] = []
    wrong: list[int] = []
    for seed, kind, seconds, what in differences(range(options.seed, options.seed + options.count)):
        kinds[kind] += 1
        times.append(seconds)
        if kind == "refused":
            reasons[re.sub(r"argument \d+", "argument N", what.partition(": ")[2])[:70]] += 1
        elif kind == "different":
            wrong.append(seed)
            print(f"seed {seed}: {what}", file=sys.stderr)
    median = statistics.median(times)
    if options.json:
        print(json.dumps({**kinds, "median_s": median, "max_s": max(times), "wrong_seeds": wrong}))
    else:
        print(f"{dict(kinds)}; median {median * 1e3:.1f} ms, most {max(times) * 1e3:.1f} ms a script")
        for reason, count in reasons.most_common(12):
            print(f"  refused {count:5d}  {reason}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
