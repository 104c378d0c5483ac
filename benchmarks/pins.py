"""What a move of code must not change: plans, projected weights, identities of runs, texts of the command line.

    python benchmarks/pins.py make /tmp/pins     # before the first move
    python benchmarks/pins.py check /tmp/pins    # after each: prints what differs, exit 1

Hashes of weights hold for one machine and one number of threads; the rest holds anywhere.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from rekindle.engine.solving import Solver

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
SOLVERS = get_args(Solver)
PLAIN = [
    "fire",
    "fire nothing.safetensors",
    "fire {file}",
    "fire {file} -o {file}",
    "fire {file} -o {folder}/missing/out.safetensors",
    "fire {file} -o {folder}/out.safetensors --targets nothing.of.this",
    "fire {file} -o {folder}/out.safetensors --scale wrong",
    "plan {file}",
    "plan {file} --json",
    "inspect {file}",
    "compare {file} {file}",
    "lab list",
    "lab run nothing",
    "polar {file}",
    "health {file}",
    "--version",
    "--help",
    "fire --help",
    "lab run --help",
]


def digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def of_tensors(tensors: Iterator[tuple[str, Tensor]]) -> str:
    whole = hashlib.sha256()
    for name, tensor in tensors:
        whole.update(name.encode() + tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:16]


def models() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    import zoo_models

    for name in zoo_models.NAMES:
        yield name, lambda name=name: zoo_models.build(name)


def families() -> Iterator[tuple[str, nn.Module]]:
    here = ROOT / "tests" / "blocks" / "zoo"
    spec = importlib.util.spec_from_file_location("zoo_families", here / "families.py")
    assert spec is not None and spec.loader is not None
    zoo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(zoo)
    for file in sorted(here.glob("*.json")):
        for name, entry in json.loads(file.read_text("utf-8")).items():
            package, _, model = name.rpartition("/")
            if package:
                yield name, zoo.build_timm(model)
            else:
                made = zoo.build(model.split()[0], entry.get("config", {}), entry.get("module", "transformers"))
                yield name, made


def plans() -> dict[str, Any]:
    import rekindle

    rows = {name: rekindle.plan(build()).to_dict() for name, build in models()}
    for name, model in families():
        rows[f"family {name}"] = rekindle.plan(model, measure="none", min_norm=0, allow_empty=True).to_dict()
    return {name: {"digest": digest(row), "row": row} for name, row in rows.items()}


def projections() -> dict[str, Any]:
    import rekindle
    import zoo_models

    rows = {}
    for name in ("mlp", "resnet", "lstm", "gpt2", "mixtral"):
        for solver in SOLVERS:
            torch.manual_seed(0)
            model = zoo_models.build(name)
            optimizer = torch.optim.Adam(model.parameters())
            try:
                receipt = rekindle.fire(model, optimizer, solver=solver)
            except (ValueError, TypeError) as error:
                rows[f"{name} {solver}"] = str(error)
                continue
            told = {k: v for k, v in receipt.to_dict().items() if k not in ("seconds", "memory")}
            rows[f"{name} {solver}"] = [of_tensors(iter(model.state_dict().items())), digest(told)]
    return rows


def identities() -> dict[str, Any]:
    from rekindle import lab

    return {
        f"{setting} {arm}": lab.Run(lab.SETTINGS[setting], lab.ARMS[arm], 0).identity
        for setting in sorted(lab.SETTINGS)
        for arm in sorted(lab.ARMS)
    }


def commands() -> dict[str, Any]:
    from safetensors.torch import save_file

    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.safetensors")
        generator = torch.Generator().manual_seed(0)
        weights = {f"{name}.weight": torch.randn(8, 8, generator=generator) for name in ("a", "b", "c")}
        save_file(weights, file)
        for line in PLAIN:
            words = [word.format(file=file, folder=folder) for word in line.split()]
            done = subprocess.run(
                [sys.executable, "-m", "rekindle", *words], capture_output=True, text=True, stdin=subprocess.DEVNULL
            )
            said = re.sub(r"\d+\.\d+ ?m?s\b", "<time>", (done.stdout + done.stderr).replace(folder, "<folder>"))
            rows[line] = {"exit": done.returncode, "text": said}
    return rows


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "plans": plans,
    "projections": projections,
    "identities": identities,
    "commands": commands,
}


def main() -> int:
    verb, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folder.mkdir(parents=True, exist_ok=True)
    different = 0
    for name, part in PARTS.items():
        if len(sys.argv) > 3 and name not in sys.argv[3:]:
            continue
        rows = json.loads(json.dumps(part(), default=str))
        file = folder / f"{name}.json"
        if verb == "make":
            file.write_text(json.dumps(rows, indent=1), "utf-8")
            print(f"{name}: {len(rows)} rows")
            continue
        before = json.loads(file.read_text("utf-8"))
        changed = [key for key in before | rows if before.get(key) != rows.get(key)]
        different += len(changed)
        print(f"{name}: {len(rows)} rows, {len(changed)} differ")
        for key in changed[:10]:
            print(f"  {key}\n    before {str(before.get(key))[:300]}\n    now    {str(rows.get(key))[:300]}")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
