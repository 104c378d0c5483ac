"""Plans against the autograd graph: wrong output layers, routers and cuts, and the share that is projected.

    python benchmarks/oracle.py nets                    # the hand-written nets
    python benchmarks/oracle.py transformers 0 200      # classes 0 to 200 of transformers, tiny
    python benchmarks/oracle.py transformers Funnel     # classes whose names begin so
    python benchmarks/oracle.py timm
    python benchmarks/oracle.py packages                # models of other packages, those that are installed
    python benchmarks/oracle.py sum FILE...             # the counts of several runs (ranges in parallel)

Each model is planned without and with an example. The oracle (`tests/support/oracle.py`) shares no code with rekindle.
Lines that differ only in numbers are printed once per model, with how often they came.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rekindle

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
sys.path[:0] = [str(SUPPORT), str(SUPPORT.parent / "blocks" / "zoo")]
NETS = sorted(path.stem for path in SUPPORT.glob("nets_of_*.py"))
BACKBONE = ("Model", "Backbone", "Encoder", "Decoder")

Candidate = tuple[str, nn.Module, Any, bool]  # its name, the model, an example, whether it is a backbone


def nets() -> Iterator[Candidate]:
    """The hand-written nets (what is true by construction, beyond what the oracle sees, is in tests/test_oracle.py)."""
    from cases import CASES, call

    for module in NETS:
        importlib.import_module(module)
    for case in CASES.values():
        if case.run is call:
            yield case.name, case.build(), case.example(), False


def transformers(first: str = "0", last: str = "100000") -> Iterator[Candidate]:
    """Every class of transformers that can be built tiny and takes one of the guessed batches."""
    import tiny_families

    classes = tiny_families.classes()
    chosen = (
        classes[int(first) : int(last)] if first.isdigit() else [c for c in classes if c.__name__.startswith(first)]
    )
    for cls in chosen:
        COUNTS["tried"] += 1
        try:
            model = tiny_families.build(cls)
        except Exception as error:
            say(f"not built: {cls.__name__}: {type(error).__name__}: {str(error)[:90]}")
            continue
        COUNTS["built"] += 1
        for batch in tiny_families.batches(model):
            try:
                with torch.no_grad():
                    model(**batch)
            except Exception:
                continue
            yield cls.__name__, model, batch, cls.__name__.endswith(BACKBONE)
            break
        else:
            say(f"not run: {cls.__name__}")


def timm() -> Iterator[Candidate]:
    """Small image classifiers of timm."""
    import families

    names = "resnet18 vit_tiny_patch16_224 convnext_atto mixer_s32_224 gmlp_s16_224 mobilenetv3_small_050"
    for name in names.split():
        meta = families.build_timm(name)
        model = meta.to_empty(device="cpu").eval()
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                nn.init.normal_(tensor.data, std=0.05)
        yield name, model, torch.randn(1, 3, 224, 224), False


def packages(*names: str) -> Iterator[Candidate]:
    """Models of other packages."""
    from packages import models

    yield from models(names)


COUNTS: Counter[str] = Counter()
LINES: Counter[str] = Counter()


def say(line: str) -> None:
    """Keep a line until the model is judged; `flush` prints it once however often it came."""
    LINES[re.sub(r"\.\d+\.", ".*.", line)] += 1


def flush() -> None:
    """Print what was said about one model."""
    for line, count in LINES.items():
        print(line if count == 1 else f"{line} ({count} times)", flush=True)
    LINES.clear()


def judge(name: str, model: nn.Module, example: Any, backbone: bool) -> None:
    """Count the mistakes of both plans of one model, and print them."""
    from cases import call
    from corpus import traced
    from oracle import Truth, mistakes, projectable

    truth = Truth.of(model, lambda: call(model, traced(example)), backbone=backbone)
    COUNTS["ran"] += 1
    parameters = dict(model.named_parameters())
    # What the oracle saw: without these counts no mistakes could mean that there was nothing to find.
    COUNTS["seen: output layers"] += len(truth.heads)
    COUNTS["seen: routers"] += len(truth.routers)
    COUNTS["seen: cut weights"] += len(truth.parts)
    COUNTS["seen: backbones, judged without output layers"] += backbone
    COUNTS["seen: matrices near an output, not in the share"] += len((truth.matrices & truth.near) - truth.heads)
    for way in ("without", "with"):
        options = {"example": example} if way == "with" else {}
        try:
            plan = rekindle.plan(model, targets="auto", measure="none", allow_empty=True, **options)
        except Exception as error:
            COUNTS[f"{way} example: raised"] += 1
            say(f"{way}: {name}: {type(error).__name__}: {str(error)[:160]}")
            continue
        for wrong in mistakes(plan.entries, truth, example=way == "with"):
            COUNTS[f"{way} example: {wrong.kind}"] += 1
            say(f"{way}: {name}: {wrong}")
        wanted = projectable(truth, parameters)
        chosen = {n for e in plan.selected for n in (e.name, e.key, *e.also)}
        COUNTS[f"{way} example: projectable"] += len(wanted)
        COUNTS[f"{way} example: projected"] += len(wanted & chosen)
        if way == "with":
            reasons = {e.name: e.refusal for e in plan.entries if e.name in wanted - chosen}
            for weight, reason in list(reasons.items())[:3]:
                say(f"  skipped: {name}: {weight}: {reason}")


def main(corpus: str, *limits: str) -> None:
    """Judge one corpus and print the counts."""
    warnings.simplefilter("ignore")
    started = time.time()
    source = {"nets": nets, "transformers": transformers, "timm": timm, "packages": packages}[corpus]
    for candidate in source(*limits):  # type: ignore[operator]
        try:
            judge(*candidate)
        except Exception as error:
            COUNTS["not judged"] += 1
            say(f"not judged: {candidate[0]}: {type(error).__name__}: {str(error)[:120]}")
        flush()
    flush()
    report()
    print(f"{time.time() - started:.0f} s")


def report() -> None:
    """Print the counts and the shares."""
    for key, count in sorted(COUNTS.items()):
        print(f"{count:6d}  {key}")
    for way in ("without", "with"):
        total = COUNTS[f"{way} example: projectable"]
        share = COUNTS[f"{way} example: projected"] / max(total, 1)
        print(f"{way} an example: {share:.1%} of {total} matrices projected")


def add_up(*files: str) -> None:
    """The counts of several runs."""
    for file in files:
        for line in Path(file).read_text("utf-8").splitlines():
            counted = re.fullmatch(r" *(\d+)  (.+)", line)
            if counted:
                COUNTS[counted[2]] += int(counted[1])
    report()


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in ("nets", "transformers", "timm", "packages", "sum"):
        sys.exit(inspect.getdoc(sys.modules[__name__]))
    (add_up if sys.argv[1] == "sum" else main)(*sys.argv[1 + (sys.argv[1] == "sum") :])
