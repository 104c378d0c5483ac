"""Models with experts, codes, latents and ranks: those of public packages as they are, and some written out here.

Each case is a model, a batch, and a function that makes all but the first units of each stack dead by hand.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from known_units import draw


@dataclass
class Case:
    """A model with stacks of one kind."""

    model: nn.Module
    batch: Any
    kind: str
    kill: Callable[[nn.Module], None]
    stacks: int = 1
    size: int = 8


class Autoencoder(nn.Module):
    """A sparse autoencoder as published: ReLU, TopK (Gao et al., 2024), or a threshold (Rajamanoharan et al., 2024)."""

    def __init__(self, gate: str = "topk", width: int = 64, inputs: int = 16, k: int = 4) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.W_dec = nn.Parameter(nn.functional.normalize(torch.randn(width, inputs, generator=generator), dim=1))
        self.W_enc = nn.Parameter(self.W_dec.detach().T.clone())
        self.b_enc, self.b_dec = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(inputs))
        self.gate, self.k = gate, k

    def encode(self, x: Tensor) -> Tensor:
        before = (x - self.b_dec) @ self.W_enc + self.b_enc
        if self.gate == "topk":
            values, indices = before.topk(self.k, dim=-1)
            return torch.zeros_like(before).scatter_(-1, indices, values.relu())
        return before.relu() * (before > 0.5) if self.gate == "jump" else before.relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x) @ self.W_dec + self.b_dec


class Quantizer(nn.Module):
    """The nearest code by squared distance (van den Oord et al., 2017)."""

    def __init__(self, codes: int = 32, inputs: int = 8) -> None:
        super().__init__()
        self.codes = nn.Embedding(codes, inputs)

    def forward(self, x: Tensor) -> Tensor:
        table = self.codes.weight
        distance = x.square().sum(-1, keepdim=True) - 2 * x @ table.T + table.square().sum(-1)
        return x + (self.codes(distance.argmin(-1)) - x).detach()


class Switch(nn.Module):
    """Experts in a list, each for the tokens that chose it (Fedus et al., 2022)."""

    def __init__(self, experts: int = 8, width: int = 16) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = chosen == number
            if rows.any():
                out[rows] = expert(x[rows])
        return x + out * shares[..., None]


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter beside it (Hu et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(12, 10)
        self.base.weight.requires_grad_(False)
        self.down, self.up = nn.Linear(12, 4, bias=False), nn.Linear(4, 10, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.up(self.down(x))


def _far(*names: str) -> Callable[[nn.Module], None]:
    """Codes from the fifth on lie where no example is."""

    @torch.no_grad()
    def kill(model: nn.Module) -> None:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(names):
                tensor[..., 4:, :] = 99.0

    return kill


def _silent(*names: str) -> Callable[[nn.Module], None]:
    """Latents from the ninth on have a bias that nothing overcomes."""

    @torch.no_grad()
    def kill(model: nn.Module) -> None:
        for name in names:
            model.get_parameter(name)[8:] = -1e3

    return kill


def _one(*names: str, axis: int = 0) -> Callable[[nn.Module], None]:
    """The router's first row is the only one that ever gets a large score: inputs have a mean."""

    @torch.no_grad()
    def kill(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name.endswith(names):
                rows = parameter.movedim(axis, 0)
                rows[1:] = rows[1:] * 1e-3 - torch.arange(1, len(rows))[:, None] * 0.5
                rows[0] = 5.0

    return kill


def _ranks(up: str) -> Callable[[nn.Module], None]:
    @torch.no_grad()
    def kill(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if up in name:
                parameter.copy_(draw(*parameter.shape))
                parameter[:, 1:] = 0

    return kill


def trained(up: str) -> Callable[[nn.Module], None]:
    """An adapter whose B is not zero any more."""

    @torch.no_grad()
    def train(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if up in name:
                parameter.copy_(draw(*parameter.shape))

    return train


def own(name: str) -> Case:
    """One of the models above."""
    torch.manual_seed(0)
    if name.startswith("autoencoder"):
        return Case(Autoencoder(name.partition(" ")[2]), draw(512, 16), "latents", _silent("b_enc"), size=64)
    if name == "quantizer":
        return Case(Quantizer(), draw(512, 8), "codes", _far("codes.weight"), size=32)
    if name == "switch":
        return Case(Switch(), draw(512, 16) + 1, "experts", _one("router.weight"))
    return Case(Adapted(), draw(8, 12), "ranks", _ranks("up"), size=4)


OWN = ("autoencoder relu", "autoencoder topk", "autoencoder jump", "quantizer", "switch", "adapter")


def quantizers(name: str) -> Case:
    """Of vector-quantize-pytorch."""
    package = pytest.importorskip("vector_quantize_pytorch")
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "ema": {},
        "cosine": {"use_cosine_sim": True},
        "learned": {"learnable_codebook": True, "ema_update": False},
        "heads": {"heads": 2, "separate_codebook_per_head": True, "codebook_dim": 8},
        "residual": {"num_quantizers": 3},
        "grouped": {"num_quantizers": 2, "groups": 2},
    }
    size, kill = 32, _far("_codebook.embed")
    kind = {"residual": "ResidualVQ", "grouped": "GroupedResidualVQ"}.get(name, "VectorQuantize")
    model = getattr(package, kind)(dim=16, codebook_size=32, **options[name])
    size = 64 if name == "heads" else 32
    if name == "cosine":

        @torch.no_grad()
        def kill(model: nn.Module) -> None:
            """Of equal codes the first is chosen."""
            model._codebook.embed[..., 4:, :] = model._codebook.embed[..., :1, :]

    return Case(model, draw(4, 128, 16), "codes", kill, {"residual": 3, "grouped": 4}.get(name, 1), size)


QUANTIZERS = ("ema", "cosine", "learned", "heads", "residual", "grouped")


class _Absent(types.ModuleType):
    """Stands for a package that is imported beside what is used here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def dictionaries(name: str) -> Case:
    """Of dictionary-learning."""
    if find_spec("dictionary_learning") is None:
        pytest.skip("dictionary-learning is not installed")
    classes = _dictionary_classes()
    torch.manual_seed(0)
    options = {"k": 4} if "TopK" in name or "Top" in name else {}
    model = classes[name](16, 64, **options)
    biases = {"JumpReluAutoEncoder": "b_enc", "GatedAutoEncoder": "gate_bias"}
    return Case(model, draw(512, 16), "latents", _silent(biases.get(name, "encoder.bias")), size=64)


DICTIONARIES = ("AutoEncoder", "GatedAutoEncoder", "JumpReluAutoEncoder", "AutoEncoderTopK", "BatchTopKSAE")


def _dictionary_classes() -> dict[str, Any]:
    absent = {name: _Absent(name) for name in ("nnsight", "wandb") if name not in sys.modules}
    sys.modules.update(absent)
    try:
        from dictionary_learning import dictionary
        from dictionary_learning.trainers import batch_top_k, top_k
    finally:
        for each in absent:
            del sys.modules[each]
    return {**vars(dictionary), **vars(top_k), **vars(batch_top_k)}


def language_models(name: str) -> Case:
    """Of transformers, tiny, with experts."""
    package = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shared = {
        **{"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2},
    }
    own: dict[str, Any] = {
        "Mixtral": {"num_local_experts": 8},
        "Qwen2Moe": {"num_experts": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
        "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 16, "head_dim": 8},
        "DeepseekV3": {
            **{"n_routed_experts": 8, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1},
            **{"first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "n_shared_experts": 1},
            **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
        },
        "Olmoe": {"num_experts": 8, "pad_token_id": None, "eos_token_id": None},
        "GraniteMoe": {"num_local_experts": 8},
        "GptOss": {"num_local_experts": 8, "head_dim": 8, "pad_token_id": None, "eos_token_id": None},
    }
    own["DeepseekV2"] = {**own["DeepseekV3"], "topk_method": "greedy"}
    ids = torch.randint(0, 50, (16, 24), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids}
    if name == "SwitchTransformers":
        sizes = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_experts": 8}
        sizes |= {"num_layers": 2, "num_decoder_layers": 2, "num_sparse_encoder_layers": 1}
        config = package.SwitchTransformersConfig(**sizes, num_sparse_decoder_layers=1, decoder_start_token_id=0)
        model: nn.Module = package.SwitchTransformersForConditionalGeneration(config)
        batch["labels"] = ids
    else:
        base, _, products = name.partition(" ")
        config = getattr(package, f"{base}Config")(**shared, **own[base])
        if products:
            config._experts_implementation = products
        model = getattr(package, f"{base}ForCausalLM")(config)

    @torch.no_grad()
    def kill(model: nn.Module) -> None:
        """Rows that differ for two experts alone: one of them comes first, and of equal ones always the same second."""
        for name, parameter in model.named_parameters():
            if name.endswith(("mlp.gate.weight", "router.weight", "router.layer.weight", "router.classifier.weight")):
                parameter.zero_()
                parameter[0], parameter[1] = 1.0, -1.0
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer[:2] = 9.0

    return Case(model, batch, "experts", kill, 1 if name.startswith("Deepseek") else 2)


LANGUAGE_MODELS = (
    *("Mixtral", "Mixtral grouped_mm", "Qwen2Moe", "Qwen3Moe", "DeepseekV2", "DeepseekV3"),
    *("Olmoe", "GraniteMoe", "GptOss", "SwitchTransformers"),
)


def layers(name: str) -> Case:
    """Of st-moe-pytorch and mixture-of-experts."""
    torch.manual_seed(0)
    batch = draw(4, 64, 16) + 1
    if name == "st-moe":
        package = pytest.importorskip("st_moe_pytorch")
        return Case(package.MoE(dim=16, num_experts=8), batch, "experts", _one("to_gates.weight"))
    package = pytest.importorskip("mixture_of_experts")
    return Case(package.MoE(dim=16, num_experts=8), batch, "experts", _one("w_gating", axis=1))


LAYERS = ("st-moe", "mixture-of-experts")


def adapters(name: str) -> Case:
    """Of PEFT, on a small GPT."""
    peft, package = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = package.GPT2Config(
        vocab_size=50, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = peft.get_peft_model(package.GPT2LMHeadModel(config), peft.LoraConfig(r=4, target_modules=["c_attn"]))
    return Case(model, {"input_ids": torch.arange(24).view(2, 12)}, "ranks", _ranks("lora_B"), 2, 4)


CASES: dict[str, Callable[[], Case]] = {
    **{name: (lambda name=name: own(name)) for name in OWN},
    **{f"quantizer {name}": (lambda name=name: quantizers(name)) for name in QUANTIZERS},
    **{f"dictionary {name}": (lambda name=name: dictionaries(name)) for name in DICTIONARIES},
    **{name: (lambda name=name: language_models(name)) for name in LANGUAGE_MODELS},
    **{name: (lambda name=name: layers(name)) for name in LAYERS},
    "peft": lambda: adapters("lora"),
}
