"""The `tidegate` command: its verbs, and the one place where an error becomes a sentence.

A verb raises what the packages raise. `docs/cli.md` documents exit status and JSON shapes.
"""

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tidegate_cli.flush import flush
from tidegate_cli.ls import ls
from tidegate_cli.pins import pin, unpin
from tidegate_cli.restore_point import restore_point
from tidegate_cli.rm import rm
from tidegate_cli.seal import seal
from tidegate_cli.terminal import (
    EXIT_STATUS,
    READER_GONE,
    NowhereToWrite,
    fail,
    sentence_of,
    silence_stdout,
    warn,
)
from tidegate_cli.verify import verify
from tidegate_contract import __version__
from tidegate_contract.errors import TidegateError


class Sentences(TyperGroup):
    """Ends with one sentence and status 1 where a verb met an error that was expected."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the verb."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            silence_stdout()
            raise typer.Exit(READER_GONE) from None
        except NowhereToWrite as error:
            silence_stdout()
            fail(str(error))
        except (OSError, TidegateError) as error:
            fail(sentence_of(error))


app = typer.Typer(
    cls=Sentences,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog=EXIT_STATUS,
)


@app.callback()
def tidegate(
    _: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=lambda asked: _show_version(asked)),
    ] = False,
) -> None:
    """Checkpoints of training runs: what lies on both tiers, and what to do about it."""


def _show_version(is_asked: bool) -> None:
    if is_asked:
        sys.stdout.write(f"tidegate {__version__}\n")
        raise typer.Exit


_REMOTE = "/mnt/pfs/tidegate/team-a/llama"
_LOCAL = "/mnt/nvme/tidegate/team-a/llama"
_EXAMPLES: dict[Callable[..., None], str] = {
    ls: f"ls {_REMOTE} \\\n      --local {_LOCAL}",
    verify: f"verify {_REMOTE} --all",
    restore_point: f"restore-point --remote {_REMOTE} --ranks 16",
    seal: f"seal out/checkpoint-1200 --run team-a/llama --step 1200 \\\n      --local {_LOCAL}",
    flush: f"flush --once --local {_LOCAL} \\\n      --remote {_REMOTE}",
    pin: f'pin 1200 --run-folder {_REMOTE} --reason "before decay"',
    unpin: f"unpin 1200 --run-folder {_REMOTE}",
    rm: f"rm 1100 --run-folder {_REMOTE}",
}
for _verb, _example in _EXAMPLES.items():
    # "\b" keeps typer from filling the lines of the paragraph that it begins.
    app.command(epilog=f"\b\nExample:\n  tidegate {_example}\n\n{EXIT_STATUS}")(_verb)


def main() -> None:
    """Entry point of the `tidegate` command."""
    os.umask(0o007)  # whatever is made here is its group's too
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:
        warn("stdout is closed: there is nowhere to answer")
        sys.exit(1)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        app(prog_name="tidegate")
    except OSError as error:  # of the help: whatever a verb raises is a sentence already
        silence_stdout()
        warn(f"stdout: {error.strerror}")
        sys.exit(1)


if __name__ == "__main__":
    main()
