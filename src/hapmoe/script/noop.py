"""MindSpeed's ``--noop-layers 0,63``: layers that --num-layers counts, hand their input on and hold no weights.

They move layers between stages of an otherwise even split (MindSpeed, features_manager/pipeline_parallel/
noop_layers.py and docs/features/noop-layers.md). A plan says itself which layers a stage holds, so a job has the true
layers only, and the split that the script makes with them as its layout.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from hapmoe.errors import InputError, Unsupported
from hapmoe.script.argv import Occurrence
from hapmoe.script.layer_pattern import read_pattern
from hapmoe.script.settings import Reading
from hapmoe.script.values import Token

__all__ = ["kept", "noop_layers", "noop_layout", "true_arguments"]

_EXCLUDED = (
    "pipeline_model_parallel_layout",
    "hybrid_layer_pattern",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def noop_layers(reading: Reading) -> frozenset[int]:
    """The layers that do nothing, counted from 0 among all; none where the flag is absent or says None.

    Raises InputError for what MindSpeed refuses, Unsupported beside another description of the split.
    """
    text = reading.word("noop_layers")
    if text is None or text in ("None", "none"):
        return frozenset()
    place, layers = reading.place("noop_layers"), reading.integer_or("num_layers", 0)
    words = text.split(",")
    if not all(word.isdecimal() and int(word) < layers for word in words):
        raise InputError(f"{place}: {text!r} is not a list of layers from 0 to {layers - 1}", hint="e.g. 0,63")
    for key in _EXCLUDED:
        if reading.given(key):
            raise Unsupported(f"{place} beside {reading.place(key)}: two descriptions of the split")
    found = frozenset(map(int, words))
    if len(found) == layers:
        raise InputError(f"{place}: no layer is left", hint="give those that do nothing")
    return found


def kept(pattern: Sequence[bool], noops: Collection[int]) -> tuple[bool, ...]:
    """A pattern of all layers as one of the true ones."""
    return tuple(entry for layer, entry in enumerate(pattern) if layer not in noops)


def noop_layout(reading: Reading, noops: Collection[int], pp: int, vpp: int, mtp: int) -> str | None:
    """The even split of all layers as a layout of the true ones; None where there is one stage.

    DualPipeV gives stage ``i`` the pieces ``i`` and ``2·PP - 1 - i`` of 2·PP (MindSpeed, docs/features/dualpipev.md).
    """
    layers = reading.integer_or("num_layers", 0)
    folded = reading.word("schedules_method") == "dualpipev"
    pieces = pp * (2 if folded else vpp)
    per_piece = reading.integer("num_layers_per_virtual_pipeline_stage")
    if folded and (vpp > 1 or per_piece):
        raise InputError("DualPipeV and virtual stages exclude each other", where=reading.place("schedules_method"))
    if layers % pieces or (per_piece and layers // pieces != per_piece):
        raise InputError(
            f"{layers} layers, those that do nothing included, do not divide into {pieces} pieces of a pipeline",
            where=reading.place("noop_layers"),
        )
    each = layers // pieces
    counts = [sum(layer not in noops for layer in range(at, at + each)) for at in range(0, layers, each)]
    if folded:
        counts = [counts[stage] + counts[-1 - stage] for stage in range(pp)]
    if len(counts) == 1:
        return None
    return "E" + "|".join(f"t*{count}" if count else "" for count in counts) + "m" * mtp + "L"


def true_arguments(
    argv: Sequence[Token], occurrences: Sequence[Occurrence], reading: Reading, noops: Collection[int]
) -> tuple[Token, ...]:
    """The arguments with numbers and patterns of the true layers; ``--noop-layers`` itself belongs to the plan."""
    words = list(argv)
    layers = reading.integer_or("num_layers", 0)
    for occurrence in occurrences:
        key = occurrence.flag.key if occurrence.flag else ""
        if key == "num_layers":
            text = str(layers - len(noops))
        elif key == "first_k_dense_replace":
            dense = reading.integer_or(key, 0)
            text = str(dense - sum(layer < dense for layer in noops))
        elif key in ("moe_layer_freq", "window_attn_skip_freq"):
            said = occurrence.values[0].text or ""
            value = read_pattern(said, flag=occurrence.name, where=occurrence.line)
            if isinstance(value, int) and abs(value) != 1:
                raise Unsupported(
                    f"{reading.place(key)} counts the layers of {reading.place('noop_layers')} too; give a list"
                )
            if isinstance(value, int):
                continue
            text = "[" + ",".join(str(each) for layer, each in enumerate(value) if layer not in noops) + "]"
        else:
            continue
        at = occurrence.first + occurrence.count - 1
        inline = occurrence.count == 1
        words[at] = replace(words[at], text=f"{occurrence.name}={text}" if inline else text, source="")
    return tuple(words)
