"""``hapmoe`` and ``python -m hapmoe``: exit codes and errors for people.

0 done; 1 an answer that is no; 2 bad input; 130 interrupted with nothing in hand; 70 our own bug.
"""

from __future__ import annotations

import os
import sys

import click

from hapmoe.cli import cli
from hapmoe.errors import HapmoeError

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit."""
    try:
        code = _run(sys.argv[1:] or ["--help"])
        sys.stdout.flush()
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("hapmoe: interrupted", err=True)
        code = 130
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "hapmoe"
        said = " ".join(error.format_message().split()).rstrip(".")
        _tell(f"{said}; `{command} --help` lists what there is")
        code = error.exit_code
    except HapmoeError as error:
        _tell(str(error))
        code = error.exit_code
    except BrokenPipeError:
        # The reader went away (`hapmoe devices | head`): nothing left to say, and nothing to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception:  # anything else is a bug of ours, and keeps its traceback
        import traceback

        traceback.print_exc()
        click.echo("hapmoe: this is a bug in HAPMoE, please report it with the lines above", err=True)
        code = 70
    sys.exit(code)


def _run(words: list[str]) -> int:
    """What click's own ``main`` does, without its opinion of Ctrl-C and of readers that go away."""
    if instruction := os.environ.get("_HAPMOE_COMPLETE"):
        from click.shell_completion import shell_complete

        return shell_complete(cli, {}, "hapmoe", "_HAPMOE_COMPLETE", instruction)
    with cli.make_context("hapmoe", words) as context:
        code = cli.invoke(context)
    return code if isinstance(code, int) else 0


def _tell(text: str) -> None:
    if "--json" in sys.argv[1:]:
        import json

        click.echo(json.dumps({"error": text}))
    click.echo(f"hapmoe: {text}", err=True)


if __name__ == "__main__":
    main()
