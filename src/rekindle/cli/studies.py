"""What the commands of the laboratory share: the study that arguments mean, running it live, its result as text."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rekindle import files
from rekindle.cli.page import made, write_page
from rekindle.cli.terminal import FINDINGS, say, show_json, show_rich, stopped, width
from rekindle.extras import install, require

if TYPE_CHECKING:
    from rekindle.lab.results import Results
    from rekindle.lab.study import Study

COMMANDS = "commands.txt"
# What the extra brings: anything else that is missing is imported by the user's own file.
_PACKAGES = {"sklearn", "scipy", "pandas", "pyarrow", "pooch", "PIL", "yaml", "tokenizers", "rich", "ray"}


def loaded(
    names: list[str],
    methods: str | None,
    seeds: str | None,
    tune: bool | None,
    folder: Path | None,
    replay: float | None,
    changed: Sequence[str],
) -> Study:
    """The study that the arguments of `run` mean."""
    from rekindle.lab.study import UNNAMED, Study

    what: str | list[str] = names[0] if len(names) == 1 else names
    study = Study.load(what, _listed(methods), _seeds(seeds), tune=tune, folder=folder)
    changes = list(changed) + ([] if replay is None else [f"replay={replay}"])
    if changes:
        from rekindle.lab.catalog import altered

        settings = [altered(setting, changes) for setting in study.settings]
        study = replace(study, settings=settings)
        if folder is None:
            # Another result: it must not take the place of the unchanged study in its folder.
            study = replace(study, name=f"{study.name}-{'-'.join(changes).replace('/', '-')}", folder=UNNAMED)
    return study


def opened(folder: Path) -> Study:
    """The study of a folder."""
    from rekindle.lab.study import Study

    if not (folder / "study.json").is_file():
        raise ValueError(f"{folder} holds no study (no study.json); `rekindle lab run` makes one")
    return Study.load(folder)


def perform(study: Study, html: Path | None, json: bool, force: bool, **how: Any) -> None:
    """Run or continue a study, and show its result; failed runs make the exit code 1. `how` is for `Study.run`."""
    _find_data(study)
    _keep_command(study)
    results = run_live(study, **how)
    if html is not None:
        write_study_page(html, results, kept_command(study), force)
    present(results, kept_command(study), json)
    if not json:
        say(f"results: {study.folder}; the page: rekindle lab report {study.folder} --html FILE")
    errors = study.last.errors if study.last is not None else {}
    if errors:
        first = next(iter(errors.values())).strip().splitlines()[-1]
        say(f"the first with: {first}", f"{len(errors)} runs failed,", "bold red")
        raise typer.Exit(FINDINGS)


def run_live(study: Study, *, again: str | None = None, **how: Any) -> Results:
    """Run a study with its live table on a terminal; Ctrl-C says how to go on, or how to start `again`."""
    for module in (
        "pandas",
        "pyarrow",
    ):  # for the table at the end: better reported before the first run than after the last
        require(module, "lab", "the table of a study")
    try:
        return study.run(progress=True, **how)
    except KeyboardInterrupt:
        if again is None:
            told = f"stopped; finished runs are kept. Go on with: rekindle lab resume {study.folder}"
        else:
            told = f"stopped. Start again with: {again}"
        raise stopped(told) from None


def write_study_page(path: Path, results: Results, command: str, force: bool) -> None:
    """The page of a study."""
    from rekindle.lab.views.page import render

    write_page(path, render(results, command), force)


def present(results: Results, command: str, json: bool) -> None:
    """The result on stdout, for programs, or for people with what the numbers mean."""
    from rekindle.lab.views.terminal import tables

    if json:
        data = made("lab") | results.to_dict()
        show_json(data | {"study": {**data["study"], "command": command}})
        return
    show_rich(tables(list(results.comparisons.values()), width()))
    if code := results.provenance():
        say("", code, "yellow")


def _find_data(study: Study) -> None:
    """Report a data set that is not there before anything runs, once, with the command that gets it."""
    from rekindle.lab import data as sets

    for setting in study.settings:
        named = setting.stream_options.get("data", ())
        for name in [named] if isinstance(named, str) else named:
            if name in sets.KNOWN and "folder" not in setting.stream_options:
                sets.find(name)


def _keep_command(study: Study) -> None:
    """Record the command that started the study in its folder; resuming does not replace it."""
    path, line = study.folder / COMMANDS, made("lab")["made"]["line"]
    known = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if line not in known and not line.startswith("rekindle lab resume"):
        study.folder.mkdir(parents=True, exist_ok=True)
        files.write(path, "\n".join([*known, line]) + "\n")


def kept_command(study: Study) -> str:
    """How the study was started."""
    path = study.folder / COMMANDS
    return path.read_text(encoding="utf-8").strip() if path.exists() else f"rekindle lab resume {study.folder}"


def _own_file(name: str) -> bool:
    """A file of the user's: neither of this package nor of what is installed."""
    return name.endswith(".py") and "site-packages" not in name and not name.startswith(str(Path(__file__).parents[1]))


@contextmanager
def needing_extras() -> Iterator[None]:
    """A missing package or data set of the laboratory is reported in one line."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] in _PACKAGES:
            raise ImportError(f"the laboratory needs {error.name}: {install('lab')}") from error
        where = next((f for f in reversed(traceback.extract_tb(error.__traceback__)) if _own_file(f.filename)), None)
        place = f"{where.filename}, line {where.lineno}: " if where else ""
        raise ImportError(f"{place}{error}") from error
    except LookupError as error:
        if type(error).__name__ == "Missing":
            raise ValueError(str(error)) from error
        raise


def _listed(names: str | None) -> list[str] | None:
    return None if names is None else [name.strip() for name in names.split(",") if name.strip()]


def _seeds(words: str | None) -> int | list[int] | None:
    if words is None:
        return None
    try:
        numbers = [int(part) for part in words.removesuffix(",").split(",")]  # "7," is the one seed 7
    except ValueError:
        raise ValueError(f"--seeds {words!r}: give a count, as in 5, or seeds with commas, as in 0,3,7 or 7,") from None
    return numbers[0] if len(numbers) == 1 and "," not in words else numbers
