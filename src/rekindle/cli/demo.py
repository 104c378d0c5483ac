"""`rekindle demo`: a network loses its plasticity on real images, and eight remedies are compared while you watch."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from rekindle import files
from rekindle.cli import options
from rekindle.cli.studies import needing_extras, present, run_live, write_study_page
from rekindle.cli.terminal import FINDINGS, reported, say

GROUP, SEEDS = "main", 3
# A little shorter than the setting itself, so that three seeds of nine arms take a minute and a half on two cores.
SHORTER = {"tasks": 12, "epochs": 20}
ABOUT = (
    "One network learns 500 handwritten digits by heart, with new random labels, twelve times over. Every task is as "
    "hard as the one before: only its ability to learn can change."
)


@reported
def demo(
    seeds: Annotated[int, typer.Option("--seeds", "-n", min=1, help="Runs of every arm.")] = SEEDS,
    methods: Annotated[
        str, typer.Option("--methods", "-m", help="Arms and groups, with commas.", autocompletion=options.complete_arms)
    ] = GROUP,
    workers: Annotated[int | None, typer.Option(help="Runs at once.", show_default="one per core")] = None,
    html: Annotated[Path, typer.Option(metavar="FILE", help="The page; overwritten.")] = Path("results/demo.html"),
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg", help="Also write the curves, moving.", show_default=False),
    ] = None,
    json: options.Json = False,
) -> None:
    """Watch a network lose its plasticity on real images, and eight remedies try to give it back. About 90 seconds.

    One network learns handwritten digits with new random labels, again and again: every task is as hard as the one
    before, and only the ability to learn can change. All arms see the same data from the same start. Then the page
    with the curves is written, and the numbers are explained.

    [bold]Examples[/]

      rekindle demo

      rekindle demo --seeds 5 --picture docs/images/demo.svg
    """
    with needing_extras(), tempfile.TemporaryDirectory(prefix="rekindle-demo-") as folder:
        from rekindle.lab.arms import arms
        from rekindle.lab.settings import SETTINGS
        from rekindle.lab.study import Study
        from rekindle.lab.views.page import learning

        digits = SETTINGS["digits"]
        setting = replace(digits, name="demo", about=ABOUT, stream_options={**digits.stream_options, **SHORTER})
        study = Study("demo", [setting], arms(methods.split(",")), list(range(seeds)), Path(folder))
        say(ABOUT)
        results = run_live(study, again="rekindle demo", workers=workers)
        command = f"rekindle demo --seeds {seeds} --methods {methods}"
        for path in filter(None, (html, picture)):
            path.absolute().parent.mkdir(parents=True, exist_ok=True)
        if picture is not None:
            files.write(picture, learning(results.comparisons["demo"])[0].file(moving=True))
        write_study_page(html, results, command, force=True)
        present(results, command, json)
        if study.last is not None and study.last.errors:
            reason = next(iter(study.last.errors.values()))[-300:]
            say(reason, f"{len(study.last.errors)} runs failed:", "bold red")
            raise typer.Exit(FINDINGS)
