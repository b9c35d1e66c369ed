"""The commands that measure: profile."""

from __future__ import annotations

import click

__all__ = ["profile"]


class _OrScript(click.Group):
    """A group whose commands may be left out: anything else is a script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, "-h", "--help"}:
            args = ["script", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_OrScript, context_settings={"help_option_names": ["-h", "--help"]})
def profile() -> None:
    """Measure kernels and collectives alone, with torch and nothing else."""
