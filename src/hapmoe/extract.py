"""A launch script and its invocation -> JobSpec: what is trained, and every argument that is not ours.

``extract`` is the whole; ``read_invocation`` and ``job_of`` are its two halves, for callers that want the argument
vector even when the job behind it has to be refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hapmoe.errors import HapmoeError, InputError
from hapmoe.inputs import read_input
from hapmoe.job import Argument, JobSpec
from hapmoe.script.argv import argument
from hapmoe.script.megatron_args import Allocation, read_arguments
from hapmoe.script.values import Invocation, holds_secret, is_secret_flag

__all__ = ["extract", "extract_document", "extract_json", "job_of", "job_yaml", "second_opinion"]


def extract(
    script: str | Path,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    *,
    vocab_size: int | None = None,
    imbalance: float | None = None,
    global_batch_size: int | None = None,
) -> JobSpec:
    """The job that ``script args...`` would start under ``env``. Nothing is executed.

    Raises InputError when the script cannot be followed or does not hold a needed value (with the
    line and what to supply), Unsupported for models that cannot be planned.
    """
    invocation = read_input(script, tuple(args), dict(env or {}))
    return job_of(invocation, vocab_size=vocab_size, imbalance=imbalance, global_batch_size=global_batch_size)


def extract_document(
    script: str | Path,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    *,
    vocab_size: int | None = None,
    imbalance: float | None = None,
    global_batch_size: int | None = None,
) -> tuple[JobSpec | None, dict[str, Any]]:
    """As :func:`extract`, but a refusal is in the document (``refused``) instead of raised."""
    job = invocation = refused = None
    try:
        invocation = read_input(script, tuple(args), dict(env or {}))
        job = job_of(invocation, vocab_size=vocab_size, imbalance=imbalance, global_batch_size=global_batch_size)
    except HapmoeError as error:
        refused = str(error)
    return job, extract_json(job, invocation, refused)


def second_opinion(
    script: str | Path, args: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What running the script in a sandbox says of the reading: ``agrees``, ``difference``, ``launches``.

    Raises InputError where it cannot be run: no bubblewrap, or no script but a configuration or a command.
    """
    from hapmoe.script.execute import compare, execute

    path = Path(script)
    if not path.is_file() or path.suffix.lower() in (".json", ".yaml", ".yml"):
        raise InputError("only a script can be run", where="--execute")
    executed = execute(path, args, env)
    try:
        difference = compare(read_input(script, tuple(args), dict(env or {})), executed)
    except HapmoeError as error:
        difference = f"the reading is refused ({error})"
    launches = [list(words) for words in executed.launches if any(word.startswith("--") for word in words)]
    return {
        "agrees": not difference,
        "difference": difference,
        "launches": [_without_secrets(each) for each in launches],
    }


def _without_secrets(words: Sequence[str]) -> list[str]:
    hidden = [
        is_secret_flag(word.partition("=")[0]) or is_secret_flag(before) or holds_secret(word)
        for before, word in zip(("", *words), words, strict=False)
    ]
    return [
        "(secret)" if hide and not (word.startswith("--") and "=" not in word) else word
        for hide, word in zip(hidden, words, strict=True)
    ]


def job_of(
    invocation: Invocation,
    *,
    vocab_size: int | None = None,
    imbalance: float | None = None,
    global_batch_size: int | None = None,
) -> JobSpec:
    """The job behind an invocation; options are the user's own values and beat the script's."""
    entry = invocation.program
    if invocation.entry is None or not entry:
        where = invocation.where or invocation.script
        raise InputError("which program trains is not known before the run", where=where)
    read = read_arguments(
        invocation.argv,
        entry=entry,
        where=invocation.where,
        allocation=Allocation(invocation.world_size, invocation.nodes, invocation.devices_per_node),
        vocab_size=vocab_size,
        imbalance=imbalance,
        global_batch_size=global_batch_size,
    )
    env = {name: argument(token) for name, token in invocation.env}
    unset = tuple(
        f"{name} is read but never set; it counts as empty (--env NAME=VALUE sets it)" for name in invocation.unset
    )
    job = JobSpec(
        name=_job_name(invocation.script),
        model=read.model,
        training=read.training,
        present=read.present,
        entry=entry,
        entry_is_module=_is_module(invocation),
        argv=read.argv,
        env=env,
        launcher=invocation.launcher,
        script=invocation.script,
        origin=read.origin,
        notes=(*read.notes, *_entry_notes(invocation), *_secret_notes(read.argv, env), *unset),
    )
    return msgspec.structs.replace(job, sha256=_digest(job))


def _job_name(script: str) -> str:
    """The file's name; of files that are all called alike the folder's, of a command none."""
    path = Path(script)
    if script == "command line":
        return "training"
    return path.parent.name or path.stem if path.stem in ("config", "model_config") else path.stem


def _entry_notes(invocation: Invocation) -> list[str]:
    """The folder of the entry, where only a run would tell it."""
    if invocation.entry is None or invocation.entry.text is not None:
        return []
    return [f"the training program is taken as {invocation.program}, from the folder the launcher is started in"]


def _is_module(invocation: Invocation) -> bool:
    launcher = [token.text for token in invocation.launcher_argv]
    return "-m" in invocation.python or "-m" in launcher or "--module" in launcher


def _secret_notes(argv: Sequence[Argument], env: Mapping[str, Argument]) -> list[str]:
    """Which credentials the reader of the script left out."""
    names = [name for name, word in env.items() if _is_secret(word)]
    notes = [f"credentials are not stored, set them where the job is launched: {', '.join(names)}"] if names else []
    for word in argv:
        if _is_secret(word) and not word.source:
            notes.append(f"{word.where}: a credential stands in the script; it is not stored, put it in a variable")
    return notes


def _is_secret(word: Argument) -> bool:
    return word.text is None and "secret" in word.why


def _digest(job: JobSpec) -> str:
    """sha256 of what the job is; not of where it was read, nor of what we say about it."""
    meant = {
        "model": job.model,
        "training": job.training,
        "present": job.present,
        "entry": [job.entry, job.entry_is_module],
        "argv": [_meaning(word) for word in job.argv],
        "env": {name: _meaning(word) for name, word in job.env.items()},
    }
    return hashlib.sha256(msgspec.json.encode(meant, order="sorted")).hexdigest()


def _meaning(word: Argument) -> list[str]:
    return ["text", word.text, word.owner] if word.text is not None else ["unknown", word.source, word.owner]


# ------------------------------------------------------------------------------------------- JSON


def extract_json(job: JobSpec | None, invocation: Invocation | None, refused: str | None = None) -> dict[str, Any]:
    """The document of ``hapmoe extract --json``; also of a refusal, as far as reading came."""
    document: dict[str, Any] = {
        "argv": [],
        "entry": None,
        "launcher": "",
        "world_size": None,
        "nodes": None,
        "devices_per_node": None,
        "env": {},
        "refused": refused,
        "job": None,
    }
    if invocation is not None:
        document |= {
            "argv": [_shown(argument(token)) for token in invocation.argv],
            "entry": _shown(argument(invocation.entry)) if invocation.entry else None,
            "launcher": invocation.launcher,
            "world_size": invocation.world_size,
            "nodes": invocation.nodes,
            "devices_per_node": invocation.devices_per_node,
            "env": {name: _shown(argument(token)) for name, token in invocation.env},
        }
    if job is not None:
        document["job"] = msgspec.to_builtins(job)
    return document


def _shown(word: Argument) -> str | dict[str, str]:
    return word.text if word.text is not None else {"unknown": word.why or word.source or "not known before the run"}


# ------------------------------------------------------------------------------------------- YAML


def job_yaml(job: JobSpec) -> str:
    """``job.yaml``: the job for people, with the place each value came from."""
    return "\n".join(_lines(job)) + "\n"


def _lines(job: JobSpec) -> Iterator[str]:
    yield f"# {job.name}: read from {job.script or 'an argument vector'}; sha256 {job.sha256}"
    for note in job.notes:
        yield f"# note: {note}"
    yield f"name: {_scalar(job.name)}"
    yield f"script: {_scalar(job.script)}"
    yield f"launcher: {_scalar(job.launcher)}"
    yield f"entry: {_scalar(job.entry)}"
    if job.entry_is_module:
        yield "entry_is_module: true"
    for section in ("model", "training", "present"):
        yield ""
        yield f"{section}:"
        yield from _section(msgspec.to_builtins(getattr(job, section)), section, job.origin, "  ")
    yield ""
    yield "# Arguments of the training program that a plan passes on as they are"
    yield from _words("arguments", [word for word in job.argv if word.owner == "user"])
    yield "# Arguments that a plan replaces"
    yield from _words("replaced", [word for word in job.argv if word.owner == "plan"])
    yield ""
    if not job.env:
        yield "env: {}"
        return
    yield "env:"
    for name, word in job.env.items():
        yield f"  {name}: {_word(word)}{_comment(word.where)}"


def _section(fields: Mapping[str, Any], path: str, origin: Mapping[str, str], indent: str) -> Iterator[str]:
    for name, value in fields.items():
        where = f"{path}.{name}"
        if isinstance(value, dict):
            yield f"{indent}{name}:{_comment(origin.get(where, ''))}"
            yield from _section(value, where, origin, indent + "  ")
        elif value is not None or where in origin:
            yield f"{indent}{name}: {_scalar(_folded(value))}{_comment(origin.get(where, ''))}"


def _folded(value: Any) -> Any:
    """A per-layer pattern in the short form that Megatron reads: ``[0]*3+[1]*58``."""
    if not (isinstance(value, list | tuple) and len(value) > 1 and all(isinstance(entry, bool) for entry in value)):
        return value
    runs: list[list[int]] = []
    for entry in value:
        if runs and runs[-1][0] == entry:
            runs[-1][1] += 1
        else:
            runs.append([int(entry), 1])
    return "+".join(f"[{entry}]*{count}" for entry, count in runs)


def _words(key: str, words: Sequence[Argument]) -> Iterator[str]:
    """One line per flag with its values, which is how people read them."""
    if not words:
        yield f"{key}: []"
        return
    yield f"{key}:"
    line: list[str] = []
    where = ""
    for word in words:
        if line and (word.text or "").startswith("--"):
            yield f"  - [{', '.join(line)}]{_comment(where)}"
            line = []
        if not line:
            where = word.where
        line.append(_word(word))
    yield f"  - [{', '.join(line)}]{_comment(where)}"


def _word(word: Argument) -> str:
    if word.text is not None:
        return _scalar(word.text)
    return f"{{unknown: {_scalar(word.why or 'not known before the run')}, source: {_scalar(word.source)}}}"


def _scalar(value: Any) -> str:
    # JSON is YAML; every string is quoted so that "on", "1e-5" or "~" stay what they are.
    return json.dumps(value, ensure_ascii=False)


def _comment(where: str) -> str:
    return f"  # {where}" if where else ""
