"""Small random models of every architecture that the tests sweep; `build(name)` hands out a fresh copy.

Building a transformers model imports its module and draws weights, so each is made once a process and copied.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 48
WIDTH = 32


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Conv2d(channels, out, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = Residual(8, 8, 1)
        self.layer2 = Residual(8, 16, 2)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(torch.relu(self.bn1(self.conv1(x))))).mean((2, 3)))


class MobileNet(nn.Module):
    """Depthwise, grouped and pointwise convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.pointwise = nn.Conv2d(8, 16, 1)
        self.grouped = nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.classifier = nn.Sequential(nn.Dropout(0.0), nn.Linear(16, 5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.stem, self.depthwise, self.pointwise, self.grouped):
            x = torch.relu(layer(x))
        return self.classifier(x.mean((2, 3)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(3, 8, 3, padding=1)
        self.down2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.up_grouped = nn.ConvTranspose2d(16, 8, 3, padding=1, groups=2)
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.relu(self.down1(x))
        b = torch.relu(self.up(torch.relu(self.down2(a))))
        return self.last(torch.relu(self.up_grouped(torch.cat([a, b], 1))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.lstm = nn.LSTM(12, 16, num_layers=2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(32, 8, batch_first=True)
        self.decoder = nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.gru(self.lstm(self.embedding(x))[0])[0])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(x)).mean(1))


class NanoAttention(nn.Module):
    """The attention of nanoGPT-style code: one Linear for q | k | v, of a class that nobody registered."""

    def __init__(self, width: int = WIDTH, heads: int = 4) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)
        self.n_head = heads

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.n_head, -1).transpose(1, 2) for y in self.c_attn(x).split(c, 2))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, t, c))


class NanoBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.attn = NanoAttention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(WIDTH, 4 * WIDTH), "c_proj": nn.Linear(4 * WIDTH, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](torch.relu(self.mlp["c_fc"](self.ln_2(x))))


class NanoGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = nn.Embedding(16, WIDTH)
        self.h = nn.ModuleList([NanoBlock(), NanoBlock()])
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device))
        for block in self.h:
            y = block(y)
        return self.lm_head(y)


def _transformers(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        with torch.random.fork_rng():
            torch.manual_seed(0)
            return getattr(transformers, model)(getattr(transformers, config)(**options))  # type: ignore[no-any-return]

    return make


_TEXT: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2}
_TEXT |= {"num_attention_heads": 4, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 0}
_WIDE = {"intermediate_size": 40}
_GROUPED = {"num_key_value_heads": 2}

TORCH: dict[str, Callable[[], nn.Module]] = {
    "mlp": MLP,
    "resnet": ResNet,
    "mobilenet": MobileNet,
    "unet": UNet,
    "lstm": Recurrent,
    "encoder": Encoder,
    "nanogpt": NanoGPT,
}

TRANSFORMERS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": _transformers(
        "GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=32
    ),
    "gpt_neox": _transformers("GPTNeoXForCausalLM", "GPTNeoXConfig", **_TEXT, **_WIDE),
    "bloom": _transformers(
        "BloomForCausalLM", "BloomConfig", vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=2, n_head=4
    ),
    "falcon_old": _transformers("FalconForCausalLM", "FalconConfig", **_TEXT, multi_query=True),
    "falcon_rw": _transformers("FalconForCausalLM", "FalconConfig", **_TEXT, multi_query=False, alibi=True),
    "falcon_new": _transformers(
        "FalconForCausalLM", "FalconConfig", **_TEXT, new_decoder_architecture=True, num_kv_heads=2
    ),
    "phi": _transformers("PhiForCausalLM", "PhiConfig", **_TEXT, **_WIDE),
    "phi3": _transformers("Phi3ForCausalLM", "Phi3Config", **_TEXT, **_WIDE, **_GROUPED, pad_token_id=0),
    "llama": _transformers("LlamaForCausalLM", "LlamaConfig", **_TEXT, **_WIDE, **_GROUPED),
    "mixtral": _transformers("MixtralForCausalLM", "MixtralConfig", **_TEXT, **_WIDE, **_GROUPED, num_local_experts=3),
    "gpt_oss": _transformers(
        "GptOssForCausalLM",
        "GptOssConfig",
        **_TEXT,
        **_WIDE,
        **_GROUPED,
        num_local_experts=3,
        head_dim=8,
        num_experts_per_tok=2,
        pad_token_id=0,
    ),
    "vit": _transformers(
        "ViTForImageClassification",
        "ViTConfig",
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=40,
        image_size=16,
        patch_size=4,
        num_labels=5,
    ),
    "bert": _transformers("BertForSequenceClassification", "BertConfig", **_TEXT, **_WIDE, num_labels=5),
    "t5": _transformers(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=8,
        d_ff=40,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        feed_forward_proj="gated-gelu",
    ),
    "mamba": _transformers(
        "MambaForCausalLM",
        "MambaConfig",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        state_size=4,
        time_step_rank=3,
    ),
    "mamba2": _transformers(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        state_size=4,
        head_dim=16,
        num_heads=4,
        n_groups=2,
        chunk_size=8,
    ),
    "codegen": _transformers(
        "CodeGenForCausalLM",
        "CodeGenConfig",
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=2,
        n_head=4,
        rotary_dim=4,
        n_positions=32,
    ),
    "bigcode": _transformers(
        "GPTBigCodeForCausalLM",
        "GPTBigCodeConfig",
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=2,
        n_head=4,
        n_positions=32,
    ),
    "modernbert": _transformers(
        "ModernBertForMaskedLM", "ModernBertConfig", **_TEXT, **_WIDE, pad_token_id=0, cls_token_id=0, sep_token_id=0
    ),
}

NAMES = (*TORCH, *TRANSFORMERS)


@functools.cache
def _original(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return (TORCH | TRANSFORMERS)[name]()


def build(name: str) -> nn.Module:
    """A copy of the named model, always with the same weights."""
    return copy.deepcopy(_original(name))


def batch(name: str) -> Any:
    """One input that the model accepts: a tensor, or a dict for `model(**batch)` with labels."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(4, 3, 16, 16, generator=generator)
    tokens = torch.randint(0, VOCABULARY, (4, 8), generator=generator)
    if name == "mlp":
        return torch.randn(4, 12, generator=generator)
    if name in ("resnet", "mobilenet", "unet"):
        return images
    if name in TORCH:
        return tokens
    if name == "vit":
        return {"pixel_values": images, "labels": torch.arange(4)}
    return {"input_ids": tokens, "labels": torch.arange(4) if name == "bert" else tokens}


def loss(model: nn.Module, inputs: Any) -> Tensor:
    """A scalar that depends on every output: the model's own loss, or mean square."""
    if isinstance(inputs, dict):
        return model(**inputs).loss  # type: ignore[no-any-return]
    return model(inputs).square().mean()
