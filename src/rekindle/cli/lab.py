"""`rekindle lab`: compare remedies fairly on streams of tasks. The laboratory itself is imported when it is used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rekindle import files
from rekindle.cli import options
from rekindle.cli.studies import (
    kept_command,
    loaded,
    needing_extras,
    opened,
    perform,
    present,
    write_study_page,
)
from rekindle.cli.terminal import progress, refuse_existing, reported, say, show_json, show_unchanged, width
from rekindle.report.words import size

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of a study.", show_default=False)]
Methods = Annotated[
    str | None,
    typer.Option(
        "--methods",
        "-m",
        metavar="ARMS",
        help="Arms and groups, with commas: all, main, controls, scales, fire,nothing… `rekindle lab list` has them.",
        show_default="main, or what the file says",
        autocompletion=options.complete_arms,
    ),
]
Seeds = Annotated[
    str | None,
    typer.Option(
        "--seeds", "-n", help="How many, or which, as in 0,3,7 (7, is the one seed 7).", show_default="5, or the file's"
    ),
]
Tune = Annotated[bool, typer.Option("--tune", help="Also show every arm tuned by the same small budget.")]
On = Annotated[str, typer.Option("--on", help="local, ray (of this machine), or the address of a Ray cluster.")]
Workers = Annotated[int | None, typer.Option(help="Runs at once.", show_default="one per core")]
Batched = Annotated[
    bool, typer.Option(help="Train the networks of a setting as one, where that works; else every run by itself.")
]


@reported
def lab_list(json: options.Json = False) -> None:
    """Show the settings, the arms and their groups, and the data sets with where they are or how to get them.

    [bold]Examples[/]

      rekindle lab list

      rekindle lab list --json
    """
    with needing_extras():
        from rekindle.lab.catalog import catalog, listed

        found = catalog()
    if json:
        show_json(found)
    else:
        show_unchanged(listed(found, width()))


@reported
def run(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME|FILE...",
            help="Settings by name, or one study as a .yaml or .py file (a .py file is run).",
            show_default=False,
            autocompletion=options.complete_settings,
        ),
    ],
    methods: Methods = None,
    seeds: Seeds = None,
    tune: Tune = False,
    replay: Annotated[
        float | None,
        typer.Option(help="Share of every earlier task's data mixed into each task.", show_default=False),
    ] = None,
    changed: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            help="Change a field of every setting, such as lr=0.01 or stream_options.tasks=5. Repeat for several.",
            show_default=False,
        ),
    ] = None,
    on: On = "local",
    workers: Workers = None,
    batched: Batched = True,
    folder: Annotated[Path | None, typer.Option(help="Where results go.", show_default="results/lab/<name>")] = None,
    html: options.Html = None,
    json: options.Json = False,
    force: options.Force = False,
) -> None:
    """Compare remedies: every arm, on every seed, in every setting. Finished runs are never repeated.

    [bold]Examples[/]

      rekindle lab run random-labels --methods main --seeds 5

      rekindle lab run random-labels permuted-inputs -m fire,nothing,scales --html report.html

      rekindle lab run mine.py --on ray
    """
    if html is not None:
        refuse_existing(html, force)
    with needing_extras():
        study = loaded(names, methods, seeds, tune or None, folder, replay, changed or ())
        perform(study, html, json, force, on=on, workers=workers, batched=batched)


@reported
def resume(
    folder: Folder,
    on: On = "local",
    workers: Workers = None,
    batched: Batched = True,
    html: options.Html = None,
    json: options.Json = False,
    force: options.Force = False,
) -> None:
    """Continue a study that was stopped or killed; finished runs are not repeated.

    [bold]Examples[/]

      rekindle lab resume results/lab/random-labels
    """
    if html is not None:
        refuse_existing(html, force)
    with needing_extras():
        perform(opened(folder), html, json, force, on=on, workers=workers, batched=batched)


@reported
def lab_show(folder: Folder, json: options.Json = False) -> None:
    """Show the table of a study, finished or not: means with intervals, differences, what they mean.

    [bold]Examples[/]

      rekindle lab show results/lab/random-labels

      rekindle lab show results/lab/random-labels --json > results.json
    """
    with needing_extras():
        study = opened(folder)
        present(study.results(), kept_command(study), json)


@reported
def lab_report(
    folder: Folder,
    html: Annotated[Path, typer.Option(metavar="FILE", help="The page.", show_default=False)],
    force: options.Force = False,
) -> None:
    """Make the page of a study.

    [bold]Examples[/]

      rekindle lab report results/lab/random-labels --html report.html
    """
    refuse_existing(html, force)
    with needing_extras():
        study = opened(folder)
        write_study_page(html, study.results(), kept_command(study), force)


@reported
def lab_atlas(
    studies: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER|ARCHIVE...", help="Studies, as folders or .tar.xz.", show_default=False),
    ],
    methods: Methods = None,
    against: Annotated[str, typer.Option(help="The arm that others are compared with.")] = "nothing",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="An SVG picture.", show_default=False)
    ] = None,
    json: options.Json = False,
    force: options.Force = False,
) -> None:
    """Show which remedy gains what on which stream: paired differences to one arm, as a table and a heat map.

    [bold]Examples[/]

      rekindle lab atlas docs/evidence/runs/factorial.tar.xz -m he-reset,nearest-he-heads -o atlas.svg
    """
    if output is not None:
        refuse_existing(output, force)
    with needing_extras():
        from rekindle.lab.execution.store import unpacked
        from rekindle.lab.views.atlas import Atlas

        found: list[Any] = []
        for path in studies:
            with unpacked(path) as folder:
                found += opened(folder).results().comparisons.values()
        atlas = Atlas.of(found, None if methods is None else methods.split(","), against)
        if output is not None:
            files.write(output, atlas.picture().file(), overwrite=force)
        if json:
            show_json(atlas.to_dict())
        else:
            show_unchanged(atlas.markdown())


@reported
def fetch(
    name: Annotated[
        str,
        typer.Argument(
            help="A data set; `rekindle lab list` has their names.",
            show_default=False,
            autocompletion=options.complete_data,
        ),
    ],
    folder: Annotated[
        Path | None, typer.Option(help="Where it goes.", show_default="$REKINDLE_DATA or the user's cache")
    ] = None,
) -> None:
    """Get a data set, checked by hash.

    [bold]Examples[/]

      rekindle lab fetch cifar-10
    """
    with needing_extras():
        from rekindle.lab import data as sets
        from rekindle.lab.data import fetching

        expected = max((way.size for way in sets.known(name).ways), default=0)
        so_far = 0

        with progress(f"fetching {name} ({size(expected)})", float(max(expected, 1))) as advance:

            def advanced(done: int, total: int) -> None:
                nonlocal so_far
                advance(float(done - so_far))
                so_far = done

            try:
                path = fetching.fetch(name, folder, progress=advanced, notice=say)
            except (sets.Missing, fetching.FetchError) as error:
                raise ValueError(str(error)) from error
        show_unchanged(str(path))
