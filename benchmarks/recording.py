"""What a recorded pass costs, in forward passes of the same model on the same batch, measured alternately.

    python benchmarks/recording.py

Process time, the least of several rounds. `floor` is the same pass under a dispatch mode that only calls the operator:
no recording in Python can cost less. `plan`: a Llama of 1.1 billion numbers on the meta device with an example.
"""

from __future__ import annotations

import itertools
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from rekindle.isolation import call
from rekindle.recording import facts_of, record

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))


class Nothing(TorchDispatchMode):
    """Calls the operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def models() -> Iterator[tuple[str, nn.Module, Any]]:
    """Name, model and batch, from tiny to one whose products take all the time."""
    from zoo_models import batch, build

    yield "MLP 64-100-100-10", nn.Sequential(*mlp(64, 100, 100, 10)), torch.randn(32, 64)
    yield "MLP 784-2048-2048-10", nn.Sequential(*mlp(784, 2048, 2048, 10)), torch.randn(256, 784)
    for name in ("resnet", "nanogpt", "llama"):
        inputs = batch(name)
        yield f"{name}, tiny", build(name).eval(), inputs
    layer = nn.TransformerEncoderLayer(384, 6, 1536, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    yield "encoder 6 × 384", nn.Sequential(encoder, nn.Linear(384, 10)).eval(), torch.randn(4, 128, 384)


def mlp(*widths: int) -> list[nn.Module]:
    """Linear layers with ReLU between."""
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    return [each for layer in layers for each in (layer, nn.ReLU())][:-1]


def seconds(run: Callable[[], Any]) -> float:
    """How long one call takes."""
    start = time.process_time()
    run()
    return time.process_time() - start


def billion() -> float:
    """Seconds for the plan of a Llama of 1.1 billion numbers on the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, num_key_value_heads=4, **size))
    example = {"input_ids": torch.zeros(1, 16, dtype=torch.long)}
    return seconds(lambda: rekindle.plan(model, example=example))


def main(rounds: int = 12) -> None:
    """Print the ratios."""
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads")
    for name, model, batch in models():
        graph = record(model, batch)

        def under_nothing(model: nn.Module = model, batch: Any = batch) -> None:
            with Nothing():
                call(model, batch)

        ways = {
            "forward": lambda: call(model, batch),  # noqa: B023
            "floor": under_nothing,
            "recording": lambda: record(model, batch),  # noqa: B023
            "facts": lambda: facts_of(graph),  # noqa: B023
        }
        with torch.no_grad():
            taken = {way: min(seconds(run) for _ in range(rounds)) for way, run in ways.items()}
        once = taken.pop("forward")
        passes = ", ".join(f"{way} {each / once:.1f}" for way, each in taken.items())
        print(f"{name}: forward {once * 1e3:.2f} ms; in passes: {passes}", flush=True)
    print(f"plan of a Llama with 1.1 B numbers on meta, with an example: {billion():.1f} s")


if __name__ == "__main__":
    main()
