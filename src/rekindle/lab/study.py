"""A study: every arm in every setting with every seed, resumable, and its results.

    study = Study.load("random-labels", methods=["nothing", "fire"], seeds=5)
    print(study.run(progress=True))

Killed at any moment, `study.run()` continues where it was: finished runs are found in the folder by their identity.
"""

from __future__ import annotations

import importlib.util
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rekindle.extras import install
from rekindle.lab import tuning
from rekindle.lab.arms import ARMS, Arm, arms
from rekindle.lab.execution import Event, Execution, Executor, Outcome, Watcher, described
from rekindle.lab.execution.jobs import TARGET
from rekindle.lab.execution.local import Pool
from rekindle.lab.execution.store import RunStore
from rekindle.lab.results import Results, RunEntry
from rekindle.lab.results.metrics import headline
from rekindle.lab.settings import SETTINGS, Run, Setting, read_source
from rekindle.lab.settings import setting as named_setting
from rekindle.monitoring.sinks import MlflowSink, Sink, TensorBoardSink, WandbSink

FORMAT = 1
SEEDS = 5
UNNAMED = Path("results/lab/<name>")


@dataclass
class Study:
    """A grid of runs in a folder. Settings and arms may be given by name, seeds as a count.

    folder: where results are; results/lab/<name> unless given. Two studies may share one, and share its runs then.
    tune: also choose a configuration of every arm by the same budget (see `tuning`) and run it beside the default.
    rates: try every arm at these factors of the learning rate, on the seeds of tuning, and report the best one only.
    comparisons: what will be claimed, written down before the first run (see `results.planned`).

    >>> from rekindle.lab.arms import arms
    >>> tiny = Setting("tiny", "random-labels", "mlp")
    >>> [(run.arm.name, run.seed) for run in Study("x", [tiny], arms(["nothing", "fire"]), [0, 1]).runs()]
    [('nothing', 0), ('nothing', 1), ('fire', 0), ('fire', 1)]
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
        sinks: Iterable[Sink | str] = (),
        *,
        batched: bool = True,
        target: str = TARGET,
    ) -> Results:
        """Do what is not done yet, and give the results.

        on: "local" (processes of this machine), "ray" (a Ray of this machine), or the address of a Ray that runs
            ("ray://host:10001", "host:6379", "auto"); or an `Executor` of your own, which is left open.
        workers: how many runs at once; as many as cores by default.
        progress: a function that gets every `Event`; True prints a line for each run.
        sinks: functions of (step, numbers), or "tensorboard", "wandb" (offline), "mlflow", which write in the folder.
            A run's numbers are sent once it has finished, one step per task.
        batched: train the networks of a setting as one where that works (`together`): several times faster for small
            networks, and equal up to rounding. Without it every run is by itself.
        """
        watch = _printed if progress is True else progress or None
        self.store.describe(self.to_dict())
        with ExitStack() as stack:
            opened = [stack.enter_context(self._sink(sink)) for sink in sinks]
            executor = self._executor(on, workers, target) if isinstance(on, str) else on
            if isinstance(on, str):
                stack.callback(executor.close)
            outcome = self._execute(executor, watch, opened, batched)
        self.last = outcome
        self.store.write_table()
        return self.results()

    def resume(self, **options: Any) -> Results:
        """Continue with what is not done; the same as `run`, which never repeats finished runs."""
        return self.run(**options)

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
                RunEntry(
                    run.setting, name, run.arm, tuned, run.seed, run.identity, self.store.read(run.identity), _code(run)
                )
                for run, name, tuned in plan
            ),
            choices,
        )

    def _execute(self, executor: Executor, watch: Watcher | None, sinks: list[Sink], batched: bool) -> Outcome:
        """First what is known beforehand, then the configurations that this chose."""
        execution = Execution(self.store, executor, watch=watch, sinks=sinks, batched=batched)
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
        from rekindle.lab.execution.on_ray import RayExecutor

        return RayExecutor(None if on == "ray" else on, workers, starts=starts, target=target)

    @contextmanager
    def _sink(self, sink: Sink | str) -> Iterator[Sink]:
        """A sink that was named is made in the folder and closed; one that was given is the caller's."""
        if not isinstance(sink, str):
            yield sink
            return
        if sink not in SINKS:
            raise ValueError(f"there is no sink {sink!r}: give a function, or one of {', '.join(SINKS)}")
        self.folder.mkdir(parents=True, exist_ok=True)
        with SINKS[sink](self.folder.resolve(), self.name) as made:
            yield made

    # To and from files

    def to_dict(self) -> dict[str, Any]:
        """What study.json holds."""
        return {
            "format": FORMAT,
            "name": self.name,
            "settings": [setting.to_dict() for setting in self.settings],
            "arms": [arm.to_dict() for arm in self.arms],
            "seeds": list(self.seeds),
            "tune": self.tune,
            "rates": list(self.rates),
            "comparisons": list(self.comparisons),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], folder: Path | str | None = None) -> Study:
        """A study from a file's content; settings and arms may be names, or fields over a named `base`.

        >>> study = Study.from_dict({"settings": [{"base": "digits", "lr": 0.01}], "arms": ["nothing"], "seeds": 2})
        >>> study.settings[0].lr, study.seeds
        (0.01, [0, 1])
        """
        known = ("name", "settings", "arms", "seeds", "tune", "rates", "comparisons", "folder", "source")
        unknown = set(data) - {*known, "format", "methods"}
        if unknown:
            raise ValueError(f"a study has no field {sorted(unknown)[0]!r}; it has {', '.join(known)}")
        if data.get("format", FORMAT) != FORMAT:
            raise ValueError(f"this study has format {data['format']}, and this version reads {FORMAT}: run it again")
        source = data.get("source")
        if source is not None:
            read_source(source)
        settings = [_setting(each, source) for each in _listed(data.get("settings", []))]
        if not settings:
            raise ValueError('a study needs settings, e.g. settings: ["random-labels"]')
        chosen = [_arm(each) for each in _listed(data.get("arms", data.get("methods", "main")))]
        name = data.get("name") or "-".join(setting.name.replace("/", "-") for setting in settings)
        where = folder if folder is not None else data.get("folder")
        return cls(
            str(name),
            settings,
            arms([arm for each in chosen for arm in each]),
            seed_list(data.get("seeds", SEEDS)),
            UNNAMED if where is None else Path(where),
            bool(data.get("tune", False)),
            [float(rate) for rate in data.get("rates", ())],
            [dict(each) for each in data.get("comparisons", ())],
        )

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

        A Python file may hold `study` (a Study), or settings and arms at its top level; what it registers is known
        to the workers too. methods, seeds, tune and folder replace what the file says.

        >>> study = Study.load("digits", methods=["nothing", "fire"], seeds=2)
        >>> study.name, len(study.runs())
        ('digits', 4)
        """
        study = _found(cls, what)
        changes: dict[str, Any] = {}
        if methods is not None:
            changes["arms"] = arms(methods)
        if seeds is not None:
            changes["seeds"] = seed_list(seeds)
        if tune is not None:
            changes["tune"] = tune
        if name is not None:
            changes |= {"name": name, "folder": UNNAMED}
        if folder is not None:
            changes["folder"] = Path(folder)
        return replace(study, **changes)


def seed_list(seeds: int | Iterable[int]) -> list[int]:
    """Five seeds are 0 to 4; a list is itself.

    >>> seed_list(3), seed_list([7, 8])
    ([0, 1, 2], [7, 8])
    """
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
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError as error:
        raise ImportError(f"a study file needs pyyaml: {install('lab')}") from error
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


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, str | Mapping) else list(value)


def _setting(value: Any, source: str | None) -> Setting:
    if isinstance(value, str):
        made = named_setting(value)
    elif "base" in value:
        rest = {name: each for name, each in value.items() if name != "base"}
        base = named_setting(value["base"]).to_dict()
        merged = {n: {**base[n], **each} if isinstance(base.get(n), dict) else each for n, each in rest.items()}
        made = Setting.from_dict(base | merged)
    else:
        made = Setting.from_dict(value)
    return made if source is None or made.source else replace(made, source=source)


def _arm(value: Any) -> list[Arm]:
    return arms(value) if isinstance(value, str) else [Arm.from_dict(value)]


def _mlflow(folder: Path, name: str) -> MlflowSink:
    if importlib.util.find_spec("sqlalchemy") is not None:
        return MlflowSink(f"sqlite:///{folder / 'mlflow.db'}", experiment=name)
    # mlflow-skinny has only a file store, which must be allowed explicitly.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    return MlflowSink((folder / "mlruns").as_uri(), experiment=name)


def _wandb(folder: Path, name: str) -> WandbSink:
    return WandbSink(mode="offline", dir=str(folder), project="rekindle-lab", name=name)


def _tensorboard(folder: Path, name: str) -> TensorBoardSink:
    return TensorBoardSink(str(folder / "tensorboard"))


SINKS: dict[str, Callable[[Path, str], Any]] = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}


def _printed(event: Event) -> None:
    if event.kind not in ("progress", "task"):
        print(described(event), file=sys.stderr, flush=True)
