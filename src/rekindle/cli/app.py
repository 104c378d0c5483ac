"""The commands in one app, and the help page."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import cleandoc
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import rekindle
from rekindle.cli import lab
from rekindle.cli.advice import advise, probe, rank
from rekindle.cli.demo import demo
from rekindle.cli.doctor import doctor
from rekindle.cli.fire import fire, plan
from rekindle.cli.inspect import compare, inspect
from rekindle.cli.page import report
from rekindle.cli.polar import polar

_HELP = """Tell whether a network has lost its plasticity, and give it back.

A checkpoint goes in, a checkpoint comes out; no script is needed:

  [bold]rekindle inspect[/] ./my-model [dim]· is it needed? spectra, ranks, a verdict[/]

  [bold]rekindle plan[/] ./my-model [dim]· what would be done, and why not[/]

  [bold]rekindle fire[/] ./my-model -o ./my-model-fire [dim]· project onto isometries, checked[/]

  [bold]rekindle compare[/] ./my-model ./my-model-fire --html report.html [dim]· what changed[/]

With the live model and its data, plasticity is measured and remedies are tried on copies:

  [bold]rekindle probe[/] mine.py [dim]· does it learn as well as a fresh network?[/]

  [bold]rekindle advise[/] mine.py [dim]· which remedy, if any[/]

  [bold]rekindle rank[/] a.pt b.pt mine.py [dim]· which checkpoint to start from[/]

Or see it first, and compare remedies on streams of your own:

  [bold]rekindle demo[/] [dim]· plasticity is lost; six remedies, live[/]

  [bold]rekindle lab run[/] random-labels --seeds 5 [dim]· the laboratory[/]

Exit codes: 0 fine, 1 findings (with --fail-on), 2 bad input, 130 stopped. Results go to stdout, messages to stderr.
"""


class _Commands(TyperGroup):
    """A group whose own flags are off unless given: for a flag that is neither, typer imports pydantic (80 ms)."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        for flag in params:
            if getattr(flag, "is_flag", False) and flag.default is None:
                flag.default = False
        return params


app = typer.Typer(
    name="rekindle",
    cls=_Commands,
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
    """The options before a command."""


_LAB_HELP = """Compare remedies fairly: the same data, start, optimizer and budget for all, on streams of tasks.

A study is every arm on every seed in every setting. It can be killed and resumed, uses all cores or a Ray
cluster, and reports paired differences with intervals.

  [bold]rekindle lab list[/] [dim]· settings, arms, data[/]

  [bold]rekindle lab run[/] random-labels --methods main --seeds 5 [dim]· or mine.yaml, or mine.py[/]

  [bold]rekindle lab report[/] results/lab/random-labels --html report.html [dim]· the page[/]
"""


def _taught(words: str | None) -> str:
    """A sentence that the source breaks over two lines is one line of help."""
    return re.sub(r"(?<!\n)\n(?!\n) *", " ", cleandoc(words or ""))


laboratory = typer.Typer(cls=_Commands, help=_taught(_LAB_HELP), rich_markup_mode="rich", no_args_is_help=True)
_COMMANDS: tuple[Callable[..., None], ...] = (
    inspect,
    plan,
    fire,
    compare,
    probe,
    advise,
    rank,
    polar,
    report,
    doctor,
    demo,
)
_LABORATORY: dict[str, Callable[..., None]] = {
    "list": lab.lab_list,
    "run": lab.run,
    "resume": lab.resume,
    "show": lab.lab_show,
    "report": lab.lab_report,
    "atlas": lab.lab_atlas,
    "fetch": lab.fetch,
}
for command in _COMMANDS:
    app.command(help=_taught(command.__doc__))(command)
for name, command in _LABORATORY.items():
    laboratory.command(name, help=_taught(command.__doc__))(command)
app.add_typer(laboratory, name="lab")
