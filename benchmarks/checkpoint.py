"""fire on a large sharded checkpoint: time, memory, and ten kills.

A script makes Llama-like shards (the shapes of TinyLlama-1.1B in float32, 4.4 GB, at --size 4). Then:

* time: the job, beside reading and writing the same bytes, and the engine's own time on the same matrices. The engine
  runs right after each batch of the job, in the same process, so that a busy machine slows both alike.
* memory: the peak of anonymous memory (RssAnon) beyond the process start, sampled every 10 ms while the job runs.
* kills: the job is started, killed with SIGKILL after a random time, ten times over, and then resumed to its end. After
  each kill the input and an old output are as before and nothing new bears the final name; in the end the result is bit
  for bit that of the uninterrupted job.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint.py                    # about 15 minutes, 14 GB of disk
    OMP_NUM_THREADS=1 python benchmarks/checkpoint.py --size 0.1 --kills 3
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rekindle.checkpoint import fire_file, open_checkpoint
from rekindle.engine.solving import Source, solve

TIME_BAR = 1.25
MEMORY_FACTOR, MEMORY_SPARE = 4, 200e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=4.0, help="GB of the checkpoint")
    parser.add_argument("--targets", default="attention")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None, help="where to work (a temporary folder)")
    parser.add_argument("--job", nargs=3, metavar=("IN", "OUT", "MODE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        source, target, mode = options.job
        print(json.dumps(job(Path(source), Path(target), mode, options.targets)))
        return
    work = Path(tempfile.mkdtemp(prefix="rekindle-bench-", dir=options.folder))
    try:
        run(work, options)
    finally:
        shutil.rmtree(work)


def run(work: Path, options: argparse.Namespace) -> None:
    source, target, old = work / "model", work / "fired", work / "killed"
    largest = make(source, options.size, options.seed)
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    print(f"{size / 1e9:.2f} GB in {len(list(source.glob('*.safetensors')))} shards, targets {options.targets}")

    found = child(source, target, "timed", options.targets)
    copy = min(copied(source, work / "copy") for _ in range(2))
    ratio = found["seconds"] / (copy + found["engine"])
    print(f"job {found['seconds']:.1f} s; copy {copy:.1f} s + engine {found['engine']:.1f} s: ", end="")
    print(f"ratio {ratio:.3f} (bar {TIME_BAR}) {'ok' if ratio <= TIME_BAR else 'MISSED'}")
    bar = MEMORY_FACTOR * largest + MEMORY_SPARE
    print(
        f"anonymous memory +{found['memory'] / 1e6:.0f} MB (bar {bar / 1e6:.0f} MB = 4 × {largest / 1e6:.0f} + 200) ",
        end="",
    )
    print("ok" if found["memory"] <= bar else "MISSED")
    kills(source, old, target, found["seconds"], options)


def make(folder: Path, size: float, seed: int) -> int:
    """TinyLlama's shapes, with as many layers as the size asks for; the bytes of the largest tensor."""
    width, mlp, keys, vocabulary = (2048, 5632, 256, 32000) if size >= 1 else (512, 1408, 128, 4000)
    layer = {"q_proj": (width, width), "k_proj": (keys, width), "v_proj": (keys, width), "o_proj": (width, width)}
    shapes = {f"self_attn.{name}": shape for name, shape in layer.items()}
    shapes |= {"mlp.gate_proj": (mlp, width), "mlp.up_proj": (mlp, width), "mlp.down_proj": (width, mlp)}
    per_layer = 4 * sum(a * b for a, b in shapes.values())
    layers = max(1, round((size * 1e9 - 8 * vocabulary * width) / per_layer))
    generator = torch.Generator().manual_seed(seed)
    folder.mkdir()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "torch_dtype": "float32",
    }
    config |= {"intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": width // 64}
    config |= {"num_key_value_heads": keys // 64, "vocab_size": vocabulary, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, width)}
    for i in range(layers):
        tensors |= {f"model.layers.{i}.{name}.weight": shape for name, shape in shapes.items()}
        tensors |= {
            f"model.layers.{i}.{name}.weight": (width,) for name in ("input_layernorm", "post_attention_layernorm")
        }
    tensors |= {"model.norm.weight": (width,), "lm_head.weight": (vocabulary, width)}
    shard: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}
    room = min(1e9, size * 1e9 / 3)
    names = list(tensors)
    number = 0
    for name in names:
        shard[name] = torch.empty(tensors[name]).normal_(0, 0.02, generator=generator)
        if sum(4 * t.numel() for t in shard.values()) > room or name == names[-1]:
            number += 1
            file = f"model-{number:05d}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(shard, file)
            shard = {}
    total = sum(4 * torch.Size(shape).numel() for shape in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    return 4 * vocabulary * width


def copied(source: Path, target: Path) -> float:
    """Seconds to read and write the same bytes and bring them to the disk."""
    target.mkdir()
    start = time.perf_counter()
    for path in source.iterdir():
        with path.open("rb") as old, (target / path.name).open("wb") as new:
            shutil.copyfileobj(old, new, 1 << 23)
            new.flush()
            os.fsync(new.fileno())
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return seconds


def job(source: Path, target: Path, mode: str, targets: str) -> dict[str, Any]:
    """One run of fire_file; "timed" also runs the engine on what was just done."""
    if mode != "timed":
        with open_checkpoint(source) as checkpoint:
            checkpoint.plan(targets=targets)  # imports, so that a kill meets the job and not the start of Python
        print("go", flush=True)
        fire_file(source, target, targets=targets, resume=True, force=True)
        return {}
    checkpoint = open_checkpoint(source)
    fired = list(checkpoint.plan(targets=targets).selected)  # also warms up the imports for both
    torch.linalg.qr(torch.randn(64, 64))
    waiting, engine, outside = list(fired), 0.0, 0.0
    watch = Watch()

    def after(done: int, total: int, name: str) -> None:
        nonlocal engine, outside
        watch.paused = True
        start = time.perf_counter()
        batch = [waiting.pop(0) for _ in range(done - (len(fired) - len(waiting)))]
        tensors = [checkpoint.read(entry.key) for entry in batch]
        begin = time.perf_counter()
        sources = [Source((1, *t.shape), t.dtype, t.device, lambda t=t: t[None]) for t in tensors]
        for _ in solve(sources):
            pass
        engine += time.perf_counter() - begin
        watch.paused = False
        outside += time.perf_counter() - start

    start = time.perf_counter()
    with watch:
        fire_file(source, target, targets=targets, progress=after)
    seconds = time.perf_counter() - start - outside
    return {"seconds": seconds, "engine": engine, "memory": watch.peak - watch.start}


class Watch:
    """The peak of the anonymous memory of this process, by a thread that looks every 10 ms."""

    def __init__(self) -> None:
        self.start = self.peak = self._now()
        self.paused = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(0.01):
            if not self.paused:
                self.peak = max(self.peak, self._now())

    @staticmethod
    def _now() -> int:
        with open("/proc/self/status", encoding="utf-8") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def command(source: Path, target: Path, mode: str, targets: str) -> list[str]:
    return [sys.executable, __file__, "--targets", targets, "--job", str(source), str(target), mode]


def child(source: Path, target: Path, mode: str, targets: str) -> dict[str, Any]:
    output = subprocess.run(command(source, target, mode, targets), check=True, capture_output=True, text=True).stdout
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def kills(source: Path, target: Path, expected: Path, seconds: float, options: argparse.Namespace) -> None:
    """Kill and resume; a small old output stands under the final name all the time."""
    target.mkdir()
    save_file({"old.weight": torch.zeros(2, 2)}, target / "model.safetensors")
    moments = random.Random(options.seed)
    untouched = digest(source, full=False)
    step = 0.25 * seconds  # some kills meet the copying at the start, some the batches after it
    for number in range(options.kills):
        process = subprocess.Popen(command(source, target, "plain", options.targets), stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        wait = moments.uniform(0, step)
        try:
            process.wait(wait)
            print(f"kill {number + 1}: the job was done before")
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        names = sorted(path.name for path in target.iterdir())
        if names != ["model.safetensors"] or digest(source, full=False) != untouched:
            raise SystemExit(f"kill {number + 1} after {wait:.1f} s: the input or the old output was damaged: {names}")
        journal = target.with_name(f".{target.name}.rekindle-journal")
        batches = journal.read_text("utf-8").count('"batch"') if journal.exists() else 0
        print(f"kill {number + 1} after {wait:.1f} s: input and old output intact, {batches} batches noted", flush=True)
    start = time.perf_counter()
    child(source, target, "plain", options.targets)
    left = [path.name for path in target.parent.iterdir() if ".rekindle-" in path.name]
    same = digest(target) == digest(expected)
    print(f"resumed and finished in {time.perf_counter() - start:.1f} s; left behind: {left or 'nothing'}; ", end="")
    print("identical to the uninterrupted result" if same else "DIFFERENT from the uninterrupted result")
    if left or not same:
        raise SystemExit(1)


def digest(folder: Path, full: bool = True) -> str:
    """The bytes of every tensor (full), or sizes and times of the files."""
    found = hashlib.blake2b()
    for path in sorted(folder.iterdir()):
        state = path.stat()
        if not full:
            found.update(f"{path.name} {state.st_size} {state.st_mtime_ns}\n".encode())
        elif path.suffix == ".safetensors":
            with path.open("rb") as file:
                head = int.from_bytes(file.read(8), "little")
                file.seek(8 + head)
                while piece := file.read(1 << 24):
                    found.update(piece)
    return found.hexdigest()


if __name__ == "__main__":
    main()
