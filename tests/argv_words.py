"""Argument vectors from one line of text."""

from __future__ import annotations

from hapmoe.script.values import Token

__all__ = ["SHAPE", "tokens"]

SHAPE = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048"


def tokens(text: str) -> tuple[Token, ...]:
    """Words of one line; ``?`` is a word that only a run would tell."""
    return tuple(
        Token(None, "command substitution $(pick)", '"$(pick)"', f"t.sh:{n}")
        if word == "?"
        else Token(word, where=f"t.sh:{n}")
        for n, word in enumerate(text.split(), 1)
    )
