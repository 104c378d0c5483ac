"""Networks whose other units may die: latents of a sparse autoencoder, codes of a VQ-VAE, experts, ranks of adapters.

Those that learn something else than classes have a `loss` of their own, which is what training and evaluation ask for.
"""

from __future__ import annotations

import copy
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rekindle.isolation import forked_rng
from rekindle.lab.networks.transformers import GPT


class SparseAutoencoder(nn.Module):
    """A TopK autoencoder (Gao et al., 2024): of each row the `k` largest latents give it back.

    `auxiliary`: the weight of AuxK, by which latents that were idle for 10 batches reconstruct what the others left.

    >>> SparseAutoencoder((5, 16), 1, latents=64)(torch.zeros(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    idle: Tensor

    def __init__(
        self, shape: tuple[int, ...], classes: int, *, latents: int = 1024, k: int = 8, auxiliary: float = 0.0
    ) -> None:
        super().__init__()
        self.k, self.auxiliary = k, auxiliary
        self.encoder, self.decoder = nn.Linear(shape[-1], latents), nn.Linear(latents, shape[-1])
        self.register_buffer("idle", torch.zeros(latents))
        self.left: tuple[Tensor, Tensor] | None = None  # of the last training pass: activities, what they did not make
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Latents of length 1."""
        nn.init.normal_(self.decoder.weight)
        self.decoder.weight.data = F.normalize(self.decoder.weight.data, dim=0)
        self.encoder.reset_parameters()
        nn.init.zeros_(self.encoder.bias)
        nn.init.zeros_(self.decoder.bias)
        self.idle.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs) → the same."""
        before = self.encoder(x - self.decoder.bias)
        values, chosen = before.topk(self.k, dim=-1)
        latents = torch.zeros_like(before).scatter_(-1, chosen, values.relu())
        made: Tensor = self.decoder(latents)
        if self.training and self.auxiliary:
            self.idle = torch.where((latents > 0).flatten(0, -2).any(0), 0.0, self.idle + 1)
            self.left = before, (x - made).detach()
        return made

    def loss(self, made: Tensor, x: Tensor) -> Tensor:
        """The share of the variance that is not given back."""
        loss = unexplained(made, x)
        dead = self.idle >= 10
        if self.training and self.left is not None and bool(dead.any()):
            before, left = self.left
            values, chosen = before.masked_fill(~dead, -torch.inf).topk(min(64, int(dead.sum())), dim=-1)
            extra = torch.zeros_like(before).scatter_(-1, chosen, values.relu()) @ self.decoder.weight.T
            loss = loss + self.auxiliary * F.mse_loss(extra, left) / left.square().mean()
        return loss


def unexplained(made: Tensor, x: Tensor) -> Tensor:
    """Squared error ÷ that of the mean."""
    spread = x - x.flatten(0, -2).mean(0) if x.ndim == 3 else x - x.mean(0)
    return F.mse_loss(made, x) / spread.square().mean()


class VQVAE(nn.Module):
    """Images through a grid of codes of vector-quantize-pytorch, learned by exponential moving averages.

    `threshold`: codes that fewer vectors use are replaced at once, by the package's own rule.
    """

    def __init__(
        self, shape: tuple[int, ...], classes: int, *, codes: int = 256, width: int = 32, threshold: float = 0.0
    ) -> None:
        super().__init__()
        from vector_quantize_pytorch import VectorQuantize

        self.encoder = nn.Sequential(
            nn.Conv2d(shape[0], width, 4, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 4, 2, 1), nn.ReLU(),
            nn.Conv2d(width, 16, 1),
        )  # fmt: skip
        self.quantizer = VectorQuantize(dim=16, codebook_size=codes, threshold_ema_dead_code=threshold)
        self.decoder = nn.Sequential(
            nn.Conv2d(16, width, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(width, width, 4, 2, 1), nn.ReLU(),
            nn.ConvTranspose2d(width, shape[0], 4, 2, 1),
        )  # fmt: skip
        self.commitment = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) → the same."""
        code = self.encoder(x)
        chosen, _, self.commitment = self.quantizer(code.flatten(2).transpose(1, 2))
        made: Tensor = self.decoder(chosen.transpose(1, 2).reshape(code.shape))
        return made

    def loss(self, made: Tensor, x: Tensor) -> Tensor:
        """The share of the variance that is not given back; in training also how far vectors are from their codes."""
        return unexplained(made, x) + (self.commitment.sum() if self.training else 0.0)


class Experts(nn.Module):
    """One of several MLPs for each token, that of the largest score, by which it is multiplied (Fedus et al., 2022)."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )
        self.unevenness: Tensor = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) → the same."""
        shares = self.router(x).softmax(-1)
        share, chosen = shares.max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            tokens = chosen == number
            if tokens.any():
                out[tokens] = expert(x[tokens])
        load = F.one_hot(chosen, len(self.experts)).float().mean((0, 1))
        self.unevenness = len(self.experts) * (load * shares.mean((0, 1))).sum()
        made: Tensor = out * share[..., None]
        return made


class ExpertGPT(GPT):
    """A GPT with experts in place of its MLPs; `collapsed`: routers that send everything to the first, by their bias.

    `balance`: the weight of the loss that keeps the load even.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        *,
        experts: int = 8,
        collapsed: float = 0.0,
        balance: float = 0.0,
        layers: int = 2,
        width: int = 48,
        heads: int = 4,
    ) -> None:
        super().__init__(shape, classes, layers=layers, width=width, heads=heads)
        self.balance = balance
        self.routed = [Experts(width, experts) for _ in range(layers)]
        for block, routed in zip(self.h, self.routed, strict=True):
            block.mlp = routed
        self.reset_parameters()
        for routed in self.routed:
            routed.router.bias.data[0] = collapsed

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Cross entropy; in training also how uneven the load is."""
        uneven = torch.stack([each.unevenness for each in self.routed]).sum() if self.training else 0.0
        return F.cross_entropy(logits.flatten(0, -2), y.flatten()) + self.balance * uneven


def adapters(
    shape: tuple[int, ...], classes: int, *, rank: int = 8, steps: int = 400, layers: int = 2, width: int = 48
) -> nn.Module:
    """A GPT that has read bytes of Shakespeare, frozen, with adapters of PEFT in all its layers."""
    import peft

    config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=["c_attn", "c_proj", "c_fc"])
    model: nn.Module = peft.get_peft_model(copy.deepcopy(_reader(shape, classes, steps, layers, width)), config)
    return model


@cache
def _reader(shape: tuple[int, ...], classes: int, steps: int, layers: int, width: int) -> GPT:
    from rekindle.lab.streams import stream

    task = stream("domains", 0, data=["shakespeare"], length=1_000_000, context=shape[0], steps=steps)[0]
    with forked_rng(torch.Generator().manual_seed(0)):
        model = GPT(shape, classes, layers=layers, width=width, heads=4)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for x, y in task.batches(16, torch.Generator().manual_seed(0)):
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(x).flatten(0, -2), y.flatten()))
        optimizer.step()
    return model
