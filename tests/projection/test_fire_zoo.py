"""fire() on the architectures people train.

For every model a table written by hand, from how its own forward uses each weight, says which matrices a parameter
holds or why it is left alone. Every parameter must fall under exactly one line; projected ones are compared with a
float64 SVD, and the model must still train afterwards.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from rekindle.projection.firing import fire

Split = Callable[[Tensor], list[Tensor]]


def whole(w: Tensor) -> list[Tensor]:
    return [w]


def turned(w: Tensor) -> list[Tensor]:
    return [w.T]


def taps(w: Tensor) -> list[Tensor]:
    return [w[:, :, i, j] for i in range(w.shape[2]) for j in range(w.shape[3])]


def turned_taps(w: Tensor) -> list[Tensor]:
    return [tap.T for tap in taps(w)]


def grouped_taps(groups: int) -> Split:
    return lambda w: [tap for part in w.chunk(groups) for tap in taps(part)]


def pieces(number: int) -> Split:
    return lambda w: list(w.chunk(number))


def sizes(*rows: int) -> Split:
    return lambda w: list(w.split(rows))


def turned_thirds(w: Tensor) -> list[Tensor]:
    return list(w.T.chunk(3))


def neox(heads: int) -> Split:
    def split(w: Tensor) -> list[Tensor]:
        each = w.shape[0] // (3 * heads)
        rows = [[h * 3 * each + part * each + i for h in range(heads) for i in range(each)] for part in range(3)]
        return [w[index] for index in rows]

    return split


def experts(parts: int) -> Split:
    return lambda w: [half for expert in w for half in expert.chunk(parts)]


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    projected: dict[str, Split]
    skipped: dict[str, str]


NORMS = {r".*(norm|ln_\w+|bn\d?)\.(weight|bias)": r"norm|bias", r".*bias(_\w+)?": "bias"}


class Residual(nn.Module):
    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut = nn.Conv2d(into, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + self.shortcut(x)).relu()  # type: ignore[no-any-return]


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1), Residual(8, 8, 1), Residual(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 5),
    )  # fmt: skip


def mobile() -> nn.Module:
    def block(into: int, out: int) -> list[nn.Module]:
        return [nn.Conv2d(into, into, 3, 1, 1, groups=into), nn.BatchNorm2d(into), nn.ReLU(), nn.Conv2d(into, out, 1)]

    grouped = nn.Conv2d(16, 8, 3, 1, 1, groups=2)
    parts = [nn.Conv2d(3, 8, 3, 2, 1), *block(8, 16), grouped, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)]
    return nn.Sequential(*parts)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 16, 3, 2, 1)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.out = nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x).relu()
        y: Tensor = self.out(torch.cat([a, self.up(self.down2(a).relu())], 1))
        return y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 8, num_layers=2, batch_first=True, bidirectional=True, proj_size=4)
        self.gru = nn.GRU(8, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.gru(self.rnn(x)[0])[0])
        return out


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.embed(tokens)))
        return out


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 3))


def images() -> Tensor:
    return torch.randn(4, 3, 8, 8)


def words() -> dict[str, Tensor]:
    tokens = torch.randint(0, 31, (2, 8))
    return {"input_ids": tokens, "labels": tokens}


def hugging(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
        return made

    return make


SMALL = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 31}
LENGTH = {"max_position_embeddings": 8}
GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 31, "n_positions": 8}
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LLAMA = {r".*self_attn\.[qkvo]_proj\.weight": whole}

ZOO = {
    "mlp": Case(mlp, lambda: torch.randn(4, 6), {r"[02]\.weight": whole}, {r"4\.weight": "head"}),
    "resnet": Case(
        resnet,
        images,
        {r"0\.weight|.*(conv\d|shortcut)\.weight": taps},
        {r"5\.weight": "head"},
    ),
    "mobile": Case(
        mobile,
        images,
        {r"[04]\.weight": taps, r"5\.weight": grouped_taps(2)},
        {r"1\.weight": "depthwise", r"2\.weight": "norm", r"8\.weight": "head"},
    ),
    "unet": Case(UNet, images, {r"down\d\.weight": taps, r"up\.weight": turned_taps}, {r"out\.weight": "head"}),
    "lstm": Case(
        Recurrent,
        lambda: torch.randn(4, 5, 6),
        {r"rnn\.weight_[ih]h_.*": pieces(4), r"rnn\.weight_hr_.*": whole, r"gru\.weight_.*": pieces(3)},
        {r"head\.weight": "head"},
    ),
    "encoder": Case(
        Encoder,
        lambda: torch.randint(0, 11, (2, 7)),
        {r".*in_proj_weight": pieces(3), r".*(out_proj|linear\d)\.weight": whole},
        {r"embed\.weight": "embedding", r"head\.weight": "head", r".*norm\d\.weight": "norm"},
    ),
    "gpt2": Case(
        hugging(
            "GPT2LMHeadModel", "GPT2Config", n_layer=2, n_head=2, n_embd=16, vocab_size=31, n_positions=8, **TOKENS
        ),
        words,
        {r".*c_attn\.weight": turned_thirds, r".*(c_proj|c_fc)\.weight": turned},
        {r".*wte\.weight": "embedding", r".*wpe\.weight": "embedding", r"lm_head\.weight": "tied"},
    ),
    "neox": Case(
        hugging("GPTNeoXForCausalLM", "GPTNeoXConfig", num_attention_heads=4, **SMALL, **LENGTH, **TOKENS),
        words,
        {r".*query_key_value\.weight": neox(4), r".*dense\w*\.weight": whole},
        {r".*embed_in\.weight": "embedding", r"lm_head\.weight": "head"},
    ),
    "llama": Case(
        hugging(
            "LlamaForCausalLM", "LlamaConfig", num_attention_heads=4, num_key_value_heads=2, **SMALL, **LENGTH, **TOKENS
        ),
        words,
        {**LLAMA, r".*(gate|up|down)_proj\.weight": whole},
        {r".*embed_tokens\.weight": "embedding", r"lm_head\.weight": "head"},
    ),
    "mixtral": Case(
        hugging(
            "MixtralForCausalLM",
            "MixtralConfig",
            num_local_experts=3,
            **GROUPED,
            **SMALL,
            **LENGTH,
            **TOKENS,
        ),
        words,
        {**LLAMA, r".*experts\.gate_up_proj": experts(2), r".*experts\.down_proj": experts(1)},
        {r".*embed_tokens\.weight": "embedding", r"lm_head\.weight": "head", r".*mlp\.gate\.weight": "router"},
    ),
    "vit": Case(
        hugging(
            "ViTForImageClassification",
            "ViTConfig",
            num_hidden_layers=2,
            num_attention_heads=2,
            hidden_size=16,
            intermediate_size=32,
            image_size=8,
            patch_size=4,
        ),
        lambda: {"pixel_values": images(), "labels": torch.randint(0, 2, (4,))},
        {r".*projection\.weight": taps, r".*(attention|mlp|intermediate|output)\..*weight": whole},
        {
            r".*(cls_token|position_embeddings)": "vector",
            r"classifier\.weight": "head",
            r".*layernorm\w*\.weight": "norm",
        },
    ),
    "bert": Case(
        hugging("BertForMaskedLM", "BertConfig", num_attention_heads=2, **SMALL, **LENGTH),
        words,
        {r".*(query|key|value|dense)\.weight": whole},
        {r".*embeddings\.weight": "embedding", r".*decoder\.weight": "tied", r".*LayerNorm\.weight": "norm"},
    ),
    "t5": Case(
        hugging(
            "T5ForConditionalGeneration",
            "T5Config",
            num_layers=1,
            num_decoder_layers=1,
            num_heads=2,
            d_model=16,
            d_kv=8,
            d_ff=32,
            vocab_size=31,
            decoder_start_token_id=0,
        ),
        words,
        {r".*Attention\.[qkvo]\.weight": whole, r".*\.w[io]\.weight": whole},
        {
            r"shared\.weight": "embedding",
            r".*relative_attention_bias\.weight": "embedding",
            r".*embed_tokens\.weight|lm_head\.weight": "tied",
        },
    ),
    "mamba": Case(
        hugging(
            "MambaForCausalLM",
            "MambaConfig",
            num_hidden_layers=2,
            hidden_size=16,
            state_size=4,
            time_step_rank=3,
            vocab_size=31,
        ),
        words,
        {r".*in_proj\.weight": pieces(2), r".*x_proj\.weight": sizes(3, 4, 4), r".*(dt|out)_proj\.weight": whole},
        {
            r".*embeddings\.weight": "embedding",
            r"lm_head\.weight": "tied",
            r".*A_log": "layout not known",
            r".*\.D": "vector",
            r".*conv1d\.weight": "depthwise",
            r".*norm(_f)?\.weight": "norm",
        },
    ),
}


def expectation(case: Case, name: str) -> Split | str:
    """The one line of the table that speaks about this parameter; more telling tables go first."""
    for table in (case.skipped, case.projected, NORMS):
        for pattern, meaning in table.items():
            if re.fullmatch(pattern, name):
                return meaning
    raise AssertionError(f"the test's table says nothing about {name}")


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, dict):
        loss: Tensor = model(**batch).loss
        return loss
    return model(batch).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.filterwarnings("ignore")
def test_every_parameter_is_projected_or_skipped_for_the_right_reason(name: str) -> None:
    case = ZOO[name]
    torch.manual_seed(0)
    model, batch = case.make(), case.batch()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))  # some configs start at zero
    before = {key: value.detach().clone() for key, value in model.named_parameters(remove_duplicate=False)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    receipt = fire(model, optimizer, targets="auto", scale="paper")
    for key, value in model.named_parameters(remove_duplicate=False):
        meaning = expectation(case, key)
        if isinstance(meaning, str):
            assert key in receipt.skipped, key
            assert re.search(meaning, receipt.skipped[key]), (key, receipt.skipped[key])
            assert torch.equal(value, before[key]), key
            continue
        assert key in receipt.changed, (key, receipt.skipped.get(key))
        number = value[0, 0].numel() if value.ndim == 4 else 1
        for old, new in zip(meaning(before[key]), meaning(value.detach()), strict=True):
            u, _, vh = torch.linalg.svd(old.double(), full_matrices=False)
            wanted = math.sqrt(old.shape[0] / old.shape[1]) / number * (u @ vh)
            torch.testing.assert_close(new.double(), wanted, rtol=0, atol=3e-3 * float(wanted.norm()), msg=key)
    assert (receipt.totals()["residual"] or 0) <= 1e-6
    trains(model, optimizer, batch)


def trains(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    first = last = math.inf
    for step in range(8):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        first, last = (loss.item() if step == 0 else first), loss.item()
    assert math.isfinite(last)
    assert last < first
