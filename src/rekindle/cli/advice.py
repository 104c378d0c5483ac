"""`rekindle probe`, `advise` and `rank`: is plasticity lost, which remedy, which checkpoint; tried on copies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rekindle.cli import options
from rekindle.cli.page import made, write_page
from rekindle.cli.studies import needing_extras
from rekindle.cli.terminal import heed, progress, refuse_existing, reported, show_json, show_unchanged

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from rekindle.advice.advising import Advice

What = Annotated[
    str,
    typer.Argument(
        metavar="FILE.py|SETTING",
        help="A file of yours that defines model and batches (it is run), or a setting of the laboratory: a network "
        "learns its tasks up to a boundary and is probed there.",
        show_default=False,
        autocompletion=options.complete_settings,
    ),
]
Steps = Annotated[int | None, typer.Option(min=1, show_default=False, help="How long training will go on.")]
Seeds = Annotated[int, typer.Option("--seeds", "-n", min=1, help="Copies per candidate; three for intervals.")]
Boundary = Annotated[
    int | None,
    typer.Option(min=1, help="Of a setting: before which task to probe.", show_default="the last"),
]
LabSeed = Annotated[int, typer.Option("--seed", help="Of a setting: the seed of its data and network.")]
Changed = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Of a setting: change a field, such as stream_options.tasks=5. Repeat for several.",
        show_default=False,
    ),
]


@dataclass
class Asked:
    """What a file or a setting brings."""

    name: str
    model: nn.Module
    batches: Any
    text: str = ""
    loss: Any = None
    optimizer: object = None
    old_batches: object = ()
    held_out: Any = ()
    fresh: Any = None
    candidates: object = None
    copy: object = None
    judge: object = None
    schedule: object = None
    clip: float | None = None
    steps: int | None = None
    advise: Callable[..., Advice] | None = None  # where that is not `rekindle.advise` of what is above


@reported
def probe(
    what: What,
    task: Annotated[
        Literal["next", "random-labels", "regression", "next-token"],
        typer.Option(help="What is learned: the batches as they are, or something else on their inputs."),
    ] = "next",
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of every copy, instead of a time.", show_default=False)
    ] = None,
    budget: Annotated[str, typer.Option(help="The time for all: 30s, 2m.")] = "30s",
    seeds: Seeds = 3,
    boundary: Boundary = None,
    seed: LabSeed = 0,
    changed: Changed = None,
    json: options.Json = False,
    html: options.Html = None,
    force: options.Force = False,
) -> None:
    """Measure plasticity: copies of the model and of fresh networks learn the same thing, and are compared.

    The file defines `model` and `batches` (a list of (inputs, targets), or dicts), and where they are needed `loss`
    (loss(model, batch)), `optimizer`, and `fresh` (a function that builds a fresh model). A score near 0 means that
    plasticity is lost, above 1 is normal for a young network. Nothing of the model is changed.

    [bold]Examples[/]

      rekindle probe mine.py

      rekindle probe mine.py --task random-labels --budget 1m --html probe.html

      rekindle probe digits --boundary 9
    """
    if html is not None:
        refuse_existing(html, force)
    asked = _asked(what, boundary, seed, changed or ())
    if asked.batches is None:
        raise ValueError(
            f"{what}: the agent has no stored returns to learn (loading restores no buffers): let it play first"
        )
    from rekindle.advice.probing import probe as measure

    heed()
    found = measure(
        asked.model,
        asked.batches,
        loss=None if task != "next" else asked.loss,
        task=task,
        fresh=asked.fresh,
        optimizer=asked.optimizer,
        steps=steps,
        budget=None if steps is not None else budget,
        seeds=seeds,
    )
    _give(asked, "probe", found, json, html, force)


@reported
def advise(
    what: What,
    budget: Annotated[
        str | None,
        typer.Option(help="The time for all candidates: 90s, 2m, 1h.", show_default="2m; 10m for agents"),
    ] = None,
    steps: Steps = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", "-n", min=1, help="Copies per candidate.", show_default="3; 5 for agents")
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Also FIRE on each group of layers alone.")] = False,
    otherwise: Annotated[
        str | None,
        typer.Option(help="The candidate to choose where trials cannot tell: fire.", show_default="nothing"),
    ] = None,
    boundary: Boundary = None,
    seed: LabSeed = 0,
    changed: Changed = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes.", show_default="one per core")] = None,
    on: Annotated[str | None, typer.Option(help="ray, for Ray.", show_default=False)] = None,
    json: options.Json = False,
    html: options.Html = None,
    force: options.Force = False,
) -> None:
    """Try remedies on copies of the model, and report which to apply, if any. Nothing of the model is changed.

    The file defines `model` and `batches` (what is to be learned next), and where they are needed `loss`
    (loss(model, batch)), `optimizer`, `old_batches` (what should not be forgotten), `held_out` (batches to judge by,
    never seen by the model) with `judge` (judge(model, batch), less is better), `schedule` (the learning rate's factor
    by the share of training) and `clip` (of gradients), `candidates` (methods of yours) and `copy` (a function that
    copies the model). The answer may be "do nothing", "do not" or "cannot tell".

    For an agent of stable-baselines3 the file defines `agent` and `make_env`, a function that returns a new
    environment of what comes next: copies of the agent play there for --steps, and the return decides.

    [bold]Examples[/]

      rekindle advise mine.py

      rekindle advise mine.py --budget 10m --steps 5000 --html advice.html

      rekindle advise random-labels --seed 3
    """
    if html is not None:
        refuse_existing(html, force)
    asked = _asked(what, boundary, seed, changed or ())
    heed()
    named = {"steps": steps or asked.steps, "budget": budget, "seeds": seeds}
    given = {name: value for name, value in named.items() if value is not None}
    ask = asked.advise or _tried(asked)
    found = ask(otherwise=otherwise, layers=layers, workers=workers, on=on, **given)
    _give(asked, "advise", found, json, html, force)


@reported
def rank(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="CHECKPOINT... FILE.py",
            help="Two checkpoints or more (safetensors, .pt, folders), and a file that defines model and batches.",
            show_default=False,
        ),
    ],
    steps: Steps = None,
    epochs: Annotated[float, typer.Option(min=0.01, help="The length in passes over the batches.")] = 1.0,
    budget: Annotated[str, typer.Option(help="The time for all: 30s, 2m.")] = "2m",
    seeds: Seeds = 3,
    fresh: Annotated[bool, typer.Option("--fresh", help="Also a new network: continue, or start again?")] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes.", show_default="one per core")] = None,
    json: options.Json = False,
    html: options.Html = None,
    force: options.Force = False,
) -> None:
    """Put checkpoints in the order in which they learn the batches best: which one to start from.

    The file defines `model` (what the checkpoints are of) and `batches` (what is to be learned next), and where they
    are needed `loss`, `optimizer` (its class and settings are used) and `held_out`. Copies of all learn the same.

    [bold]Examples[/]

      rekindle rank step-1000.safetensors step-5000.safetensors mine.py

      rekindle rank runs/a.pt runs/b.pt mine.py --fresh --steps 200 --html rank.html
    """
    if html is not None:
        refuse_existing(html, force)
    *paths, file = what
    if not file.endswith(".py") or len(paths) + fresh < 2:
        raise ValueError("give two checkpoints or more, then the .py file that defines model and batches")
    asked = _from_file(Path(file))
    names = [Path(path).name if len({Path(p).name for p in paths}) == len(paths) else path for path in paths]
    models = {name: _with_weights(asked.model, path) for name, path in zip(names, paths, strict=True)}
    from rekindle.advice.ranking import rank as order

    optimizer = asked.optimizer
    if optimizer is not None:
        from rekindle.advice.copies import optimizers_like, twins

        optimizer = optimizers_like(optimizer, twins(asked.model, models[names[0]]))
    heed()
    given = {"steps": steps, "epochs": epochs, "budget": budget, "seeds": seeds, "fresh": fresh, "workers": workers}
    found = order(
        models,
        asked.batches,
        loss=asked.loss,
        held_out=asked.held_out,
        optimizer=optimizer,
        **given,  # type: ignore[arg-type]
    )
    _give(asked, "rank", found, json, html, force)


def _with_weights(model: nn.Module, path: str) -> nn.Module:
    """A copy of the model with the weights of a checkpoint."""
    import copy

    from rekindle.checkpoint import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        state = {name: checkpoint.read(name) for name in checkpoint.names}
    made = copy.deepcopy(model)
    try:
        made.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the model of the file: {error}") from None
    return made


def _tried(asked: Asked) -> Callable[..., Advice]:
    """Ask with copies of the model that learn the batches."""
    from rekindle.advice.advising import advise as ask

    names = ("loss", "old_batches", "held_out", "optimizer", "candidates", "copy", "judge", "schedule", "clip")
    return partial(ask, asked.model, asked.batches, **{name: getattr(asked, name) for name in names})


def _give(asked: Asked, command: str, found: Any, json: bool, html: Path | None, force: bool) -> None:
    kind = {"advise": "advice", "rank": "ranking"}.get(command, command)
    facts = made(command) | {"source": {"name": asked.name, "text": asked.text}, kind: found.to_dict()}
    if html is not None:
        write_page(html, facts, force)
    if json:
        show_json(facts)
    else:
        text = str(found).replace("more steps= or budget=", "more --steps or --budget")
        show_unchanged(text)  # the call must stay Python


def _asked(what: str, boundary: int | None, seed: int, changed: Sequence[str]) -> Asked:
    if what.endswith(".py"):
        if boundary is not None or changed:
            raise ValueError("--boundary and --set are for settings of the laboratory, not for files")
        return _from_file(Path(what))
    if Path(what).exists():
        raise ValueError(f"{what} is not a .py file: a probe needs the live model, its data and its loss")
    with needing_extras():
        return _from_laboratory(what, boundary, seed, changed)


def _from_file(path: Path) -> Asked:
    """What a user's file defines; functions without arguments are called where a value is needed."""
    from torch import nn

    defined = options.run_file(path)

    def taken(name: str, example: str) -> Any:
        if not hasattr(defined, name):
            raise ValueError(f"{path} does not define {name}: write for example {example}")
        return getattr(defined, name)

    if hasattr(defined, "agent") and not hasattr(defined, "model"):
        return _from_agent(path, defined)
    model = taken("model", "model = MyNetwork()")
    model = model if isinstance(model, nn.Module) else model()
    if not isinstance(model, nn.Module):
        raise ValueError(f"{path}: model is a {type(model).__name__}, not a torch.nn.Module")
    batches = options.listed_batches(taken("batches", "batches = [(inputs, targets), …]"), f"{path}: batches")
    more = {
        name: options.listed_batches(getattr(defined, name), f"{path}: {name}")
        for name in ("old_batches", "held_out")
        if hasattr(defined, name)
    }
    given = ("loss", "optimizer", "fresh", "candidates", "copy", "judge", "schedule", "clip")
    others = {name: getattr(defined, name) for name in given if hasattr(defined, name)}
    count = sum(p.numel() for p in model.parameters())
    return Asked(path.name, model, batches, f"{type(model).__name__}, {count:,} parameters", **more, **others)


def _from_agent(path: Path, defined: Any) -> Asked:
    """A file that defines an agent of stable-baselines3, and the environment that it will play in."""
    with needing_extras():
        from rekindle.integrations import sb3
        from rekindle.integrations.agent_advice import advise_agent

        agent = defined.agent
        model = sb3.trained(agent)[0]
    stored = sb3.value_regression(agent) or (None, None)
    given = ("candidates", "prepare", "restart", "copies")
    options = {name: getattr(defined, name) for name in given if hasattr(defined, name)}

    def asking(**more: Any) -> Advice:
        if not callable(make := getattr(defined, "make_env", None)) or "steps" not in more:
            raise ValueError(
                f"{path}: advice lets copies of the agent play: define make_env, a function that returns a new "
                "environment, and give --steps, or define steps"
            )
        return advise_agent(agent, make, **options, **more)

    return Asked(
        path.name,
        model,
        stored[0],
        f"{type(agent).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters",
        loss=stored[1],
        optimizer=sb3.trained(agent)[1],
        fresh=sb3.fresh_networks(agent),
        steps=getattr(defined, "steps", None),
        advise=asking,
    )


def _from_laboratory(name: str, index: int | None, seed: int, changed: Sequence[str]) -> Asked:
    from rekindle.lab.boundaries import quiet, reach
    from rekindle.lab.catalog import altered
    from rekindle.lab.settings import setting

    chosen = quiet(altered(setting(name), list(changed)) if changed else setting(name))
    stream: Any = chosen.make_agent_stream(seed) if chosen.agents else chosen.make_stream(seed)
    last = len(stream) - 1 if index is None else index
    with progress(f"learning {last} tasks of {name}", last) as advance:
        found = reach(chosen, seed, last, lambda row: advance(row["kind"] == "task"))
        text = f"{name}, seed {seed}: the network after {last} of {len(stream)} tasks without a remedy"
        if chosen.agents:
            text += "; copies of the agent play for advice, a probe learns the stored returns"
        return Asked(
            f"{name} before task {last + 1}",
            found.model,
            found.batches,
            text,
            loss=found.loss,
            optimizer=found.optimizer,
            old_batches=found.old_batches,
            held_out=found.held_out,
            fresh=found.fresh,
            judge=found.judge,
            schedule=found.schedule,
            clip=chosen.clip,
            steps=found.steps,
            advise=found.advise if chosen.agents else None,
        )
