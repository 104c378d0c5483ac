"""The tables, pictures and figures of README and docs/evidence, from the runs that are stored in docs/evidence/runs.

    python studies/evidence.py                     # make tables and pictures again
    python studies/evidence.py --check             # say which pages differ from their runs
    python studies/evidence.py --run factorial     # do a study again (hours), in results/lab, and store its runs

In a page, what stands between `<!-- table: … -->` and `<!-- end -->` is made here: `KIND ARGUMENTS`, see `TABLES`.
The rest is written by hand, but every figure in a sentence has a line in docs/evidence/figures.yaml that says which
stored value it is (`figures.py`), or says that it is none. tests/lab/test_evidence.py checks tables and figures, and
so does `benchmarks/claims.py --check`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tarfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rekindle.lab.execution.store import pack, unpacked
from rekindle.lab.networks import network
from rekindle.lab.results import PlannedComparison, Results, planned, values
from rekindle.lab.results.statistics import t_interval
from rekindle.lab.results.wording import Measure, measure
from rekindle.lab.study import Study
from rekindle.lab.views.atlas import Atlas
from rekindle.lab.views.page import learning as curves_of
from rekindle.lab.views.plots import Line, curves
from rekindle.lab.views.svg import Picture
from rekindle.projection.planning import plan

HOME = Path(__file__).resolve().parents[1]
PAGES = HOME / "docs" / "evidence"
STORES = PAGES / "runs"
_BLOCK = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)

DIRECTIONS = {"old": "old", "gaussian": "Gaussian", "isometry": "random isometry", "nearest": "nearest isometry"}
NORMS = {"torch": "torch's start", "he": "He's", "trained": "as trained", "paper": "the paper's"}
REMEDIES = (
    *("rate-rewarm", "old-he", "full-reset", "he-reset", "orthogonal-reset", "gaussian-he"),
    *("isometry-he", "nearest-trained", "nearest-paper", "nearest-he", "nearest-paper-heads", "nearest-he-heads"),
)


@cache
def results(store: str) -> Results:
    """The results of a stored study."""
    with unpacked(STORES / f"{store}.tar.xz") as folder:
        return Study.load(folder).results()


def _rows(*lines: list[str]) -> str:
    head, *rest = lines
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rest]) + "\n"


def _mean(store: str, setting: str, arm: str, metric: str, interval: bool = True) -> str:
    found = values(results(store), setting, arm, metric)
    if not found:
        return "–"
    around, unit = t_interval(list(found.values())), measure(metric)
    return f"{unit.number(around.mean)} {unit.ends(around) if interval else ''}".strip()


def cells(store: str, setting: str) -> str:
    """Every cell of the factorial in one setting: directions by norm, without and with the output layer."""
    metric = results(store).settings[setting].headline
    lines = [["directions", "output layer", *NORMS.values()]]
    for direction, called in DIRECTIONS.items():
        for heads, said in (("", "no"), ("-heads", "yes")):
            shown = [_mean(store, setting, f"{direction}-{norm}{heads}", metric, False) for norm in NORMS]
            lines.append([called, said, *shown])
    return _rows(*lines)


def arms(store: str, setting: str, *names: str) -> str:
    """Arms of a setting: the headline with its interval, the end of a task, test data, old tasks at the boundary."""
    found = results(store)
    headline = found.settings[setting].headline
    kind = "loss" if headline.endswith("loss") else "accuracy"
    metrics = dict.fromkeys((headline, f"train_{kind}", f"test_{kind}", f"old_{kind}_start"))
    if headline.endswith("return"):
        metrics = dict.fromkeys((headline,))
    used = [each for each in metrics if any(values(found, setting, name, each) for name in names)]
    head = ["arm", "seeds", *(measure(each).axis for each in used)]
    lines = []
    for name in names:
        shown = [_mean(store, setting, name, each, each == headline) for each in used]
        lines.append([f"`{name}`", str(len(values(found, setting, name, headline))), *shown])
    return _rows(head, *lines)


def claims(store: str, *settings: str) -> str:
    """What the study said that it would compare, by stream: differences and intervals, and Holm's verdict over all."""

    def cell(each: PlannedComparison, unit: Measure) -> str:
        return f"{unit.difference(each.difference.mean)} {unit.difference_ends(each.difference)}"

    return _planned(store, settings, cell)


def ends(store: str, *settings: str) -> str:
    """The same comparisons at the end of a task."""
    return _planned(store, settings, lambda each, unit: "–" if each.end is None else unit.difference(each.end.mean))


def _planned(store: str, settings: Sequence[str], cell: Callable[[PlannedComparison, Measure], str]) -> str:
    found = results(store)
    settings = settings or tuple(found.settings)
    rows: dict[str, dict[str, str]] = {}
    for each in planned(found):
        said = cell(each, measure(found.settings[each.setting].headline))
        marked = {"better": f"**{said}**", "worse": f"**{said}**", "the same": f"≈ {said}"}.get(each.verdict, said)
        rows.setdefault(f"{each.about} (`{each.arm}` − `{each.minus}`)", {})[each.setting] = marked
    return _rows(
        ["comparison", *settings],
        *([about, *(told.get(name, "–") for name in settings)] for about, told in rows.items()),
    )


def pairs(store: str, setting: str, reference: str, *names: str) -> str:
    """Paired differences of arms to one arm."""
    comparison = results(store).comparisons[setting]
    unit = comparison.headline
    lines = [["arm", unit.axis, f"minus `{reference}`", "95% interval"]]
    for name in names:
        found = comparison.against(name, reference)
        shown = ["–", "–"] if found is None else [unit.difference(found.mean), unit.difference_ends(found)]
        lines.append([f"`{name}`", unit.number(comparison.interval(name).mean), *shown])
    return _rows(*lines)


def atlas(name: str, metric: str, stores: str, *remedies: str) -> str:
    """A picture NAME.svg and its table: gains over nothing. Stores are joined by commas, as STORE or STORE:A+B."""
    chosen = []
    for each in stores.split(","):
        store, _, settings = each.partition(":")
        found = results(store).comparisons
        chosen += [found[setting] for setting in settings.split("+") if setting] or list(found.values())
    made = Atlas.of(chosen, remedies or REMEDIES, metric=metric)
    picture(name, made.picture())
    return f"![Gain of each remedy over nothing, by stream]({name}.svg)\n\n{made.markdown()}\n"


def picture(name: str, made: Picture) -> None:
    """Write the picture of a page."""
    (PAGES / f"{name}.svg").write_text(made.file(), "utf-8")


def learning(name: str, store: str, setting: str) -> str:
    """A picture NAME.svg of the headline over the tasks."""
    drawn = curves_of(results(store).comparisons[setting])[0]
    picture(name, drawn)
    return f"![{drawn.title}]({name}.svg)\n"


def rule(*settings: str) -> str:
    """The default of `fire` against the best of all arms, a He reset and nothing, each stream as STORE:SETTING."""
    lines = [["stream", "normalized", "the default", "best arm", "default − best", "− he-reset", "− nothing"]]
    for each in settings:
        store, name = each.split(":")
        found = results(store).comparisons[name]
        normal, mine = default_cell(store, name)
        first, second = found.ranked[:2]
        unit, shown = found.headline, []
        for other in (second if first == mine else first, "he-reset", "nothing"):
            pair = found.against(mine, other)
            shown.append("–" if pair is None else f"{unit.difference(pair.mean)} {unit.difference_ends(pair)}")
        best = f"itself, then `{second}`" if first == mine else f"`{first}`"
        lines.append([name, "yes" if normal else "no", f"`{mine}`", best, *shown])
    return _rows(*lines)


@cache
def default_cell(store: str, setting: str) -> tuple[bool, str]:
    """Whether a setting's network normalizes, and the arm whose plan is that of `fire` with its defaults."""
    entries = [each for each in results(store).entries if each.setting.name == setting]
    about, chosen = entries[0].record.rows[0]["stream"], entries[0].setting
    if chosen.agents:  # plain linear layers
        return False, "nearest-he-heads"
    shape = tuple(about["shape"])
    model = network(chosen.network, shape=shape, classes=about["classes"], seed=0, **chosen.network_options)
    wanted = plan(model, measure="none")
    cells = {e.arm.name: e.arm.options for e in entries if e.arm.method == "FIRE"}
    same = [name for name, options in cells.items() if plan(model, measure="none", **options).entries == wanted.entries]
    return wanted.scale.rule == "paper", same[0]


def advice(kind: str) -> str:
    """A table of benchmarks/advice.py from its stored entries: "table", "against_nothing" or "depths"."""
    sys.path.insert(0, str(HOME / "benchmarks"))
    import advice as benchmark

    return _rows(*getattr(benchmark, kind)(_stored("entries")))


def families() -> str:
    """How well `rank` and its rivals order the checkpoints of a family, from the stored runs of benchmarks/rank.py."""
    sys.path.insert(0, str(HOME / "benchmarks"))
    import rank as benchmark

    return _rows(*benchmark.table(_stored("families")))


def fresh() -> str:
    """The verdict on untrained networks by shape, from the stored runs of benchmarks/verdict.py."""
    runs = _stored("fresh")
    lines = [["untrained networks", "count", "healthy", "watch", "act"]]
    for kind in [*dict.fromkeys(each["kind"] for each in runs if each["verdict"] != "healthy"), "all"]:
        said = [each["verdict"] for each in runs if kind in ("all", each["kind"])]
        lines.append([kind, str(len(said)), *(str(said.count(word)) for word in lines[0][2:])])
    return _rows(*lines)


def _stored(name: str) -> list[dict[str, Any]]:
    with tarfile.open(STORES / "advice.tar.xz") as archive:
        file = archive.extractfile(f"advice/{name}.jsonl")
        assert file is not None
        return [json.loads(line) for line in file]


def units(kind: str, *shown: str) -> str:
    """A picture units-KIND.svg of how many units are dead after each part, and a table; NAME=STORE:SETTING:ARM."""
    use = "effective_rank" if kind == "ranks" else "perplexity"
    head = ["", "seeds", f"dead {kind}", use.replace("_", " "), "loss on test data", "loss at once"]
    lines, table = [], [head]
    for each in shown:
        name, where = each.replace("_", " ").split("=")
        store, setting, arm = where.split(":")
        found = [e for e in results(store).entries if (e.setting.name, e.name) == (setting, arm)]
        runs = [e.tasks for e in found if e.record.state == "finished"]
        if len(runs) < 2:
            continue
        stacks = [[row["health"]["units"][kind] for row in rows] for rows in runs]
        dead = [t_interval([100 * rows[part]["dead"] for rows in stacks]) for part in range(len(runs[0]))]
        places, mean = [1 + part for part in range(len(dead))], [end.mean for end in dead]
        low, high = [max(0.0, end.low or 0.0) for end in dead], [min(100.0, end.high or 100.0) for end in dead]
        lines.append(Line(name, places, mean, low, high))
        loss = t_interval([rows[-1]["test_loss"] for rows in runs])
        acts = [row["remedy"] for rows in runs for row in rows if row["remedy"]]
        rise = max((act["loss_after"] / act["loss_before"] - 1 for act in acts), default=None)
        ends = [f"{mean[-1]:.0f}%", f"{t_interval([rows[-1][use] for rows in stacks]).mean:.1f}"]
        ends += [f"{loss.mean:.3f} [{loss.low:.3f}, {loss.high:.3f}]", "–" if rise is None else f"{rise:+.1%}"]
        table.append([name, str(len(runs)), *ends])
    note = "Mean with its 95 % interval."
    made = curves(f"Dead {kind}", lines, x="part of the training", y="dead, %", start=0.0, note=note)
    picture(f"units-{kind}", made)
    return f"![Dead {kind} after each part of the training](evidence/units-{kind}.svg)\n\n{_rows(*table)}"


def verdict() -> str:
    """How often the verdict was in time, late or wrong, from the stored runs of benchmarks/verdict.py."""
    sys.path.insert(0, str(HOME / "benchmarks"))
    import verdict as benchmark

    runs = [json.loads(line) for line in (PAGES / "verdict-runs.jsonl").read_text("utf-8").splitlines()]
    streams = [("Fashion-MNIST, ReLU", "stream", "ReLU")]
    streams += [(f"digits, {kind}", "activation", kind) for kind in benchmark.ACTIVATIONS]
    lines = [["random labels", "arm", "networks", "in time", "late", "lost", "false alarm", "quiet"]]
    for said, part, kind in streams:
        for arm in benchmark.ARMS:
            mine = [each for each in runs if (each["part"], each["kind"], each["arm"]) == (part, kind, arm)]
            found = [benchmark.outcome(each) for each in mine]
            counts = [str(found.count(word)) for word in lines[0][3:]]
            lines.append([said, arm, str(len(mine)), *counts])
    return _rows(*lines)


TABLES: dict[str, Callable[..., str]] = {
    each.__name__: each
    for each in (cells, arms, claims, ends, pairs, atlas, learning, rule, advice, families, fresh, verdict, units)
}


def page(text: str) -> str:
    """The text of a page with its tables made anew."""

    def made(match: re.Match[str]) -> str:
        kind, *arguments = (word.replace("+tuned", " (tuned)") for word in match[2].split())
        return f"{match[1]}{TABLES[kind](*arguments)}{match[3]}"

    return _BLOCK.sub(made, text)


def pages() -> list[Path]:
    """The pages that hold tables."""
    known = (HOME / "README.md", HOME / "docs" / "units.md", *sorted(PAGES.glob("*.md")))
    return [path for path in known if "<!-- table:" in path.read_text("utf-8")]


def differing() -> list[str]:
    """The pages whose tables are not those of the stored runs; pictures are not looked at."""
    return [path.name for path in pages() if page(path.read_text("utf-8")) != path.read_text("utf-8")]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--run", metavar="STUDY", help="a file of studies/, without .yaml")
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()
    if options.run:
        study = Study.load(HOME / "studies" / f"{options.run}.yaml")
        study.run(progress=True, workers=options.workers)
        runs = [*study.runs(), *study.tuning_runs(), *study.tuned_runs()]
        kept = pack(study.store, dict.fromkeys(run.identity for run in runs), STORES / f"{study.name}.tar.xz")
        print(f"{kept} runs stored")
    if options.check:
        wrong = differing()
        print(
            "differ from their runs: " + ", ".join(wrong) if wrong else f"{len(pages())} pages are what their runs say"
        )
        sys.exit(bool(wrong))
    for path in pages():
        path.write_text(page(path.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
