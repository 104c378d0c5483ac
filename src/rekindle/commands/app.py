"""The commands put together, and the page of help that teaches them."""

from __future__ import annotations

import re
from inspect import cleandoc
from typing import Annotated

import typer

import rekindle
from rekindle.commands.compare import compare
from rekindle.commands.doctor import doctor
from rekindle.commands.fire import fire
from rekindle.commands.inspect import inspect
from rekindle.commands.page import report
from rekindle.commands.planning import plan
from rekindle.commands.polar import polar

_HELP = """Tell whether a network has lost its plasticity, and give it back.

A checkpoint goes in, a checkpoint comes out; no script is needed:

  [bold]rekindle inspect[/] ./my-model [dim]· is it needed? spectra, ranks, a verdict[/]

  [bold]rekindle plan[/] ./my-model [dim]· what would be done, and why not[/]

  [bold]rekindle fire[/] ./my-model -o ./rekindled [dim]· project onto isometries, certified[/]

  [bold]rekindle compare[/] ./my-model ./rekindled --html report.html [dim]· what changed[/]

Exit codes: 0 fine, 1 findings (with --fail-on), 2 bad input. Results go to stdout, messages to stderr.
"""

app = typer.Typer(
    name="rekindle",
    help=_HELP,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"rekindle {rekindle.__version__}")
        raise typer.Exit


@app.callback()
def rekindle_(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """The options that stand before a command."""


for command in (inspect, plan, fire, compare, polar, report, doctor):
    # A sentence that the source breaks over two lines is one line of help.
    app.command(help=re.sub(r"(?<!\n)\n(?!\n) *", " ", cleandoc(command.__doc__ or "")))(command)
