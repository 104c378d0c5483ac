"""A study: every arm in every setting with every seed, resumable, and its results.

    study = Study.load("random-labels", methods=["nothing", "fire"], seeds=5)
    print(study.run(progress=True))

Killed at any moment, `study.run()` continues where it was: finished runs are found in the folder by their identity.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rekindle.extras import require
from rekindle.lab import tuning
from rekindle.lab.arms import ARMS, Arm, arms
from rekindle.lab.execution import Execution, Executor, Outcome, Watcher
from rekindle.lab.execution.store import RunStore
from rekindle.lab.execution.workers import TARGET, Pool
from rekindle.lab.protocols import over
from rekindle.lab.results import Results, RunEntry
from rekindle.lab.results.metrics import headline
from rekindle.lab.settings import SETTINGS, Run, Setting, read_source
from rekindle.lab.settings import setting as named_setting

SEEDS = 5
UNNAMED = Path("results/lab/<name>")


@dataclass
class Study:
    """A grid of runs in a folder. Settings and arms may be given by name, seeds as a count.

    >>> tiny = Setting("tiny", "random-labels", "mlp")
    >>> [(run.arm.name, run.seed) for run in Study("x", [tiny], ["nothing", "fire"], 2).runs()]
    [('nothing', 0), ('nothing', 1), ('fire', 0), ('fire', 1)]

    Args:
        name: What it is called.
        settings: What is learned, by what, and how; names of settings will do.
        arms: The remedies; names of arms and groups will do.
        seeds: How many, or which.
        folder: Where results are; results/lab/<name> unless given. Two studies may share one, and share its runs then.
        tune: Also choose a configuration of every arm by the same budget (see `tuning`) and run it beside the default.
        rates: Try every arm at these factors of the learning rate, on the seeds of tuning; report the best only.
        comparisons: What will be claimed, written down before the first run (see `results.planned`).
        last: How the last `run` ended.
    """

    name: str
    settings: list[Setting] = field(default_factory=list)
    arms: list[Arm] = field(default_factory=list)
    seeds: list[int] = field(default_factory=lambda: seed_list(SEEDS))
    folder: Path = UNNAMED
    tune: bool = False
    rates: list[float] = field(default_factory=list)
    comparisons: list[dict[str, Any]] = field(default_factory=list)
    last: Outcome | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.settings and self.arms):
            raise ValueError(
                "a study needs its name, settings and arms: Study('mine', ['digits'], ['nothing', 'fire'], seeds=5); "
                "Study.load('digits', ['nothing', 'fire'], seeds=5) is the study of a named setting or file"
            )
        self.settings = [named_setting(each) if isinstance(each, str) else each for each in _listed(self.settings)]
        self.arms = [arm for each in _listed(self.arms) for arm in (arms(each) if isinstance(each, str) else [each])]
        self.seeds = seed_list(self.seeds)
        for what, names in (("setting", [s.name for s in self.settings]), ("arm", [a.name for a in self.arms])):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"study {self.name!r} has the {what} {twice[0]!r} twice; give one another name")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"study {self.name!r}: seeds must be different numbers, at least one; got {self.seeds}")
        if self.tune and self.rates:
            raise ValueError(f"study {self.name!r}: rates are a way of tuning; leave out one of tune and rates")
        if (self.tune or self.rates) and set(self.seeds) & set(tuning.SEEDS):
            raise ValueError(f"study {self.name!r}: seeds {list(tuning.SEEDS)} are for tuning; report others")
        self.folder = UNNAMED.with_name(self.name) if self.folder == UNNAMED else Path(self.folder)

    @property
    def store(self) -> RunStore:
        """The folder's files."""
        return RunStore(self.folder)

    # What there is to do

    def runs(self) -> list[Run]:
        """The runs of the grid, by setting, arm and seed; with `rates` the chosen ones, once they are known."""
        return self.tuned_runs() if self.rates else self._grid()

    def _grid(self) -> list[Run]:
        return [Run(s, arm, seed) for s in self.settings for arm in self.arms for seed in self.seeds]

    def tuning_runs(self) -> list[Run]:
        """The runs that choose a configuration for every arm, if the study tunes."""
        if not self.tune and not self.rates:
            return []
        return [
            Run(s, each, seed)
            for s in self.settings
            for arm in self.arms
            for each in self._candidates(arm)
            for seed in tuning.SEEDS
        ]

    def _candidates(self, arm: Arm) -> list[Arm]:
        return tuning.at_rates(arm, self.rates) if self.rates else tuning.candidates(arm)

    def choices(self) -> dict[tuple[str, str], tuning.TunedChoice]:
        """By setting and arm: the configuration that the finished tuning runs choose."""
        if not self.tune and not self.rates:
            return {}
        chosen: dict[tuple[str, str], tuning.TunedChoice] = {}
        for setting in self.settings:
            for arm in self.arms:
                tried = self._candidates(arm)
                values: list[dict[int, float]] = []
                for each in tried:
                    records = {seed: self.store.read(Run(setting, each, seed).identity) for seed in tuning.SEEDS}
                    found = {s: headline(r.rows, setting) for s, r in records.items() if r.state == "finished"}
                    values.append({seed: value for seed, value in found.items() if value is not None})
                chosen[setting.name, arm.name] = tuning.choose(tried, values, falling=setting.falling)
        return chosen

    def tuned_runs(self) -> list[Run]:
        """The chosen configurations on the reported seeds."""
        settings = {setting.name: setting for setting in self.settings}
        return [
            Run(settings[name], choice.arm, seed)
            for (name, _), choice in self.choices().items()
            if choice.arm is not None
            for seed in self.seeds
        ]

    # Doing it

    def run(
        self,
        on: str | Executor = "local",
        workers: int | None = None,
        progress: Watcher | bool | None = None,
        *,
        batched: bool = True,
        target: str = TARGET,
    ) -> Results:
        """Do what is not done yet, and give the results.

        Args:
            on: "local" (processes of this machine), "ray" (a Ray of this machine), or the address of a Ray that runs
                ("ray://host:10001", "host:6379", "auto"); or an `Executor` of your own, which is left open.
            workers: How many runs at once; as many as cores by default.
            progress: A function that gets every `Event`; True shows a table, or lines where there is no terminal.
            batched: Train the networks of a setting as one where that works (`together`): several times faster for
                small networks, and equal up to rounding. Without it every run is by itself.
            target: What performs a run, as "module:function".
        """
        if progress is True:
            from rekindle.lab.views.terminal import Board, live

            with live(Board(self.name, {run.identity: run.arm.name for run in self.runs()})) as watch:
                return self.run(on, workers, watch, batched=batched, target=target)
        self.store.describe(self.to_dict())
        executor = self._executor(on, workers, target) if isinstance(on, str) else on
        try:
            self.last = self._execute(executor, progress or None, batched)
        finally:
            if isinstance(on, str):
                executor.close()
        results = self.results()
        self.store.write_table(results.frame())
        return results

    def results(self) -> Results:
        """What the folder holds of this study now."""
        plan = [] if self.rates else [(run, run.arm.name, False) for run in self._grid()]
        choices = self.choices()
        for setting in self.settings:
            for arm in self.arms:
                chosen = choices.get((setting.name, arm.name))
                if chosen is not None and chosen.arm is not None:
                    name = arm.name if self.rates else tuning.tuned_name(arm.name)
                    plan += [(Run(setting, chosen.arm, seed), name, not self.rates) for seed in self.seeds]
        return Results(
            self.to_dict(),
            tuple(
                RunEntry(run.setting, name, run.arm, tuned, run.seed, run.identity, self.store.read(run.identity), code)
                for run, name, tuned in plan
                for code in [_code(run)]
            ),
            choices,
        )

    def _execute(self, executor: Executor, watch: Watcher | None, batched: bool) -> Outcome:
        """First what is known beforehand, then the configurations that this chose."""
        execution = Execution(self.store, executor, watch=watch, batched=batched)
        grid = self._grid()
        if self.rates:  # setting by setting, so that each is whole before the next begins
            for setting in self.settings:
                part = replace(self, settings=[setting])
                execution.do(part.tuning_runs())
                execution.do(part.tuned_runs())
            return execution.outcome
        execution.do([*grid, *self.tuning_runs()], later=len(grid) if self.tune else 0)
        return execution.do(self.tuned_runs()) if self.tune else execution.outcome

    def _executor(self, on: str, workers: int | None, target: str) -> Executor:
        starts = self.store.starts
        if on == "local":
            return Pool(workers, starts=starts, target=target)
        from rekindle.lab.execution.workers import RayExecutor

        return RayExecutor(None if on == "ray" else on, workers, starts=starts, target=target)

    # To and from files

    def to_dict(self) -> dict[str, Any]:
        """What study.json holds."""
        return {
            "name": self.name,
            "settings": [setting.to_dict() for setting in self.settings],
            "arms": [arm.to_dict() for arm in self.arms],
            "seeds": list(self.seeds),
            "tune": self.tune,
            "rates": list(self.rates),
            "comparisons": list(self.comparisons),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], folder: Path | str = UNNAMED) -> Study:
        """A study from a file's content; settings and arms may be names, or fields over a named `base`."""
        known = ("name", "settings", "arms", "seeds", "tune", "rates", "comparisons", "source")
        if unknown := sorted(set(data) - {*known, "format"}):
            raise ValueError(f"a study has no field {unknown[0]!r}; it has {', '.join(known)}")
        source = data.get("source")
        if source is not None:
            read_source(source)
        settings = [_setting(each, source) for each in _listed(data.get("settings", []))]
        if not settings:
            raise ValueError('a study needs settings, e.g. settings: ["random-labels"]')
        chosen = [each if isinstance(each, str) else Arm.from_dict(each) for each in _listed(data.get("arms", "main"))]
        name = data.get("name") or "-".join(setting.name.replace("/", "-") for setting in settings)
        given = {field: data[field] for field in ("seeds", "tune", "rates", "comparisons") if field in data}
        return cls(str(name), settings, arms(chosen), folder=Path(folder), **given)

    @classmethod
    def load(
        cls,
        what: str | Path | Sequence[str],
        methods: str | Sequence[str | Arm] | None = None,
        seeds: int | Sequence[int] | None = None,
        *,
        folder: Path | str | None = None,
        tune: bool | None = None,
        name: str | None = None,
    ) -> Study:
        """A study from a built-in setting's name (or several), a .yaml or .py file, or the folder of an earlier one.

        >>> study = Study.load("digits", methods=["nothing", "fire"], seeds=2)
        >>> study.name, len(study.runs())
        ('digits', 4)

        Args:
            what: A Python file may hold `study` (a Study), or settings and arms at its top level; what it registers is
                known to the workers too.
            methods: Arms and groups instead of those of the file; so are `seeds`, `tune` and `folder`.
            seeds: How many, or which.
            folder: Where results are.
            tune: Whether every arm is tuned too.
            name: Another name, and another folder with it.
        """
        study = _found(cls, what)  # first: it may register arms
        changes: dict[str, Any] = {
            "arms": None if methods is None else arms(methods),
            "seeds": None if seeds is None else seed_list(seeds),
            "tune": tune,
            "name": name,
            "folder": folder if folder is not None or name is None else UNNAMED,
        }
        return replace(study, **{field: each for field, each in changes.items() if each is not None})


def seed_list(seeds: int | Iterable[int]) -> list[int]:
    """Five seeds are 0 to 4; a list is itself."""
    if isinstance(seeds, int):
        if seeds < 1:
            raise ValueError(f"seeds={seeds}: at least one is needed")
        return list(range(seeds))
    try:
        return [operator.index(seed) for seed in seeds]
    except TypeError:
        raise ValueError(f"seeds={seeds!r}: give a count, as in 5, or whole numbers, as in [0, 3, 7]") from None


def _found(cls: type[Study], what: str | Path | Sequence[str]) -> Study:
    if not isinstance(what, str | Path):
        return cls.from_dict({"settings": list(what)})
    path = Path(what)
    if path.is_dir() and ((path / "study.json").exists() or str(what) not in SETTINGS):
        return cls.from_dict(RunStore(path).description(), folder=path)
    if path.suffix in (".yaml", ".yml", ".json", ".py"):
        if not path.is_file():
            raise FileNotFoundError(f"there is no study file {str(what)!r}")
        return _from_python(cls, path) if path.suffix == ".py" else cls.from_dict({"name": path.stem} | _yaml(path))
    return cls.from_dict({"settings": [str(what)]})


def _yaml(path: Path) -> dict[str, Any]:
    yaml = require("yaml", "lab", "a study file")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a mapping with settings, arms and seeds")
    if content.get("source") is not None:
        content["source"] = str((path.parent / content["source"]).resolve())
    return content


def _from_python(cls: type[Study], path: Path) -> Study:
    before = set(ARMS)
    module = read_source(path)
    own = [name for name in ARMS if name not in before]
    study = getattr(module, "study", None)
    if study is None:
        content = list(vars(module).values())
        settings = [each for each in content if isinstance(each, Setting)]
        if not settings:
            raise ValueError(f"{path} holds neither `study = Study(…)` nor a Setting")
        mine = [each for each in content if isinstance(each, Arm)]
        study = cls(path.stem, settings, arms(["main", *own, *mine]), seed_list(SEEDS))
    if not isinstance(study, cls):
        raise ValueError(f"{path}: `study` is a {type(study).__name__}, not a Study")
    source = str(path.resolve())
    return replace(study, settings=[replace(each, source=each.source or source) for each in study.settings])


def _code(run: Run) -> str | None:
    """The run's code; None for a network or method that is not known here."""
    try:
        return run.code
    except ValueError:
        return None


def _listed(value: str | Mapping[str, Any] | Iterable[Any]) -> list[Any]:
    return [value] if isinstance(value, str | Mapping) else list(value)


def _setting(value: str | Mapping[str, Any], source: str | None) -> Setting:
    if isinstance(value, str):
        made = named_setting(value)
    else:
        rest = {name: each for name, each in value.items() if name != "base"}
        made = Setting.from_dict(over(named_setting(value["base"]).to_dict() if "base" in value else {}, rest))
    return made if source is None or made.source else replace(made, source=source)
