"""Small models of other packages, each with a batch; those whose package is not installed are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from cases import noise, tokens

IMAGE = noise(2, 3, 32, 32)
SMALL = noise(2, 3, 16, 16)
WORDS = tokens(2, 16)
Made = tuple[nn.Module, Any]
MODELS: dict[str, Callable[[], Made]] = {}


def model(make: Callable[[], Iterable[tuple[str, Callable[[], Made]]]]) -> None:
    """Register the models of one package: (name, how to make it and a batch)."""
    package = make.__name__
    for name, build in make():
        MODELS[f"{package}.{name}"] = build


def models(wanted: tuple[str, ...]) -> Iterator[tuple[str, nn.Module, Any, bool]]:
    """(name, model, batch, whether it is a backbone) of every model that can be built and runs."""
    for name, build in MODELS.items():
        if wanted and not name.startswith(wanted):
            continue
        try:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                made, batch = build()
            for parameter in made.parameters():  # zeros would hide what depends on what
                if parameter.dim() > 1 and not parameter.any():
                    nn.init.normal_(parameter.data, std=0.1)
            yield name, made.eval(), batch, False
        except Exception as error:
            print(f"not built: {name}: {type(error).__name__}: {str(error)[:120]}")


@model
def x_transformers() -> Any:
    def make(**options: Any) -> Made:
        import x_transformers as x

        layers = x.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
        return x.TransformerWrapper(num_tokens=16, max_seq_len=16, attn_layers=layers), WORDS()

    yield "decoder", make
    yield "glu", lambda: make(ff_glu=True, ff_swish=True, rotary_pos_emb=True)
    yield "gru", lambda: make(gate_residual=True)
    yield "kv", lambda: make(attn_kv_heads=2, attn_gate_values=True)

    def encoder() -> Made:
        import x_transformers as x

        layers = x.Encoder(dim=32, depth=2, heads=4, attn_dim_head=8, macaron=True)
        net = x.ViTransformerWrapper(image_size=32, patch_size=8, num_classes=5, attn_layers=layers)
        return net, IMAGE()

    yield "vit", encoder


@model
def vit_pytorch() -> Any:
    def make(module: str, kind: str, **options: Any) -> Made:
        import importlib

        found = getattr(importlib.import_module(f"vit_pytorch.{module}"), kind)
        return found(**options), IMAGE()

    size = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 48}
    yield "vit", lambda: make("vit", "ViT", **size)
    yield "simple", lambda: make("simple_vit", "SimpleViT", **size)
    yield "deepvit", lambda: make("deepvit", "DeepViT", **size)
    yield "cait", lambda: make("cait", "CaiT", **size, cls_depth=1)
    yield "rvt", lambda: make("rvt", "RvT", **size)
    yield (
        "cct",
        lambda: make(
            "cct", "CCT", img_size=32, embedding_dim=32, n_conv_layers=1, num_layers=2, num_heads=4, num_classes=5
        ),
    )


@model
def st_moe_pytorch() -> Any:
    def make() -> Made:
        from st_moe_pytorch import MoE

        layer = MoE(dim=16, num_experts=4, gating_top_n=2, threshold_train=0.2, threshold_eval=0.2)
        return Ends(layer, 16), noise(2, 8, 16)()

    yield "moe", make


@model
def mixture_of_experts() -> Any:
    def make() -> Made:
        from mixture_of_experts import MoE

        return Ends(MoE(dim=16, num_experts=4, hidden_dim=24), 16), noise(2, 8, 16)()

    yield "moe", make


class Ends(nn.Module):
    """A layer of a package between two of torch's."""

    def __init__(self, middle: nn.Module, width: int, out: int | None = None) -> None:
        super().__init__()
        self.inlet, self.middle, self.last = nn.Linear(width, width), middle, nn.Linear(out or width, 3)

    def forward(self, x: Any) -> Any:
        made = self.middle(torch.tanh(self.inlet(x)))
        return self.last(made[0] if isinstance(made, tuple) else made)


@model
def vector_quantize_pytorch() -> Any:
    def make() -> Made:
        from vector_quantize_pytorch import VectorQuantize

        return Ends(VectorQuantize(dim=16, codebook_size=8, codebook_dim=4), 16), noise(2, 8, 16)()

    yield "vq", make

    def lookup_free() -> Made:
        from vector_quantize_pytorch import LFQ

        return Ends(LFQ(codebook_size=16, dim=16), 16), noise(2, 8, 16)()

    yield "lfq", lookup_free


@model
def denoising_diffusion_pytorch() -> Any:
    def make() -> Made:
        from denoising_diffusion_pytorch import Unet

        return Unet(dim=16, dim_mults=(1, 2), flash_attn=False), {"x": SMALL(), "time": torch.tensor([3, 5])}

    yield "unet", make


@model
def performer_pytorch() -> Any:
    def make(**options: Any) -> Made:
        from performer_pytorch import PerformerLM

        net = PerformerLM(num_tokens=16, max_seq_len=16, dim=32, depth=2, heads=4, dim_head=8, nb_features=8, **options)
        return net, WORDS()

    yield "lm", make
    yield "glu", lambda: make(ff_glu=True)


@model
def g_mlp_pytorch() -> Any:
    def make() -> Made:
        from g_mlp_pytorch import gMLP

        return gMLP(num_tokens=16, dim=32, depth=2, seq_len=16), WORDS()

    yield "gmlp", make

    def vision() -> Made:
        from g_mlp_pytorch import gMLPVision

        return gMLPVision(image_size=32, patch_size=8, num_classes=5, dim=32, depth=2), IMAGE()

    yield "vision", vision


class Density(nn.Module):
    def __init__(self, flow: nn.Module) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, x: Any) -> Any:
        return self.flow.log_prob(x)  # type: ignore[operator]


@model
def nflows() -> Any:
    def realnvp() -> Made:
        from nflows.flows.realnvp import SimpleRealNVP

        return Density(SimpleRealNVP(6, 16, num_layers=2, num_blocks_per_layer=1)), noise(4, 6)()

    def maf() -> Made:
        from nflows.flows.autoregressive import MaskedAutoregressiveFlow

        return Density(MaskedAutoregressiveFlow(6, 16, num_layers=2, num_blocks_per_layer=1)), noise(4, 6)()

    yield "realnvp", realnvp
    yield "maf", maf


@model
def torch_geometric() -> Any:
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [1, 2, 3, 4, 5, 0, 3, 5]])

    def make(kind: str, **options: Any) -> Made:
        import torch_geometric.nn as g

        return getattr(g, kind)(8, 16, 2, 3, **options), {"x": noise(6, 8)(), "edge_index": edges}

    for kind in ("GCN", "GraphSAGE", "GIN", "GAT", "PNA", "EdgeCNN"):
        degrees = {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": torch.tensor([0, 4, 2])}
        yield kind, lambda kind=kind, degrees=degrees: make(kind, **(degrees if kind == "PNA" else {}))

    def gated() -> Made:
        import torch_geometric.nn as g

        return GraphNet(g.TransformerConv(16, 8, heads=2), 16), {"x": noise(6, 16)(), "edges": edges}

    yield "transformer", gated


class GraphNet(nn.Module):
    def __init__(self, middle: nn.Module, width: int) -> None:
        super().__init__()
        self.inlet, self.middle, self.last = nn.Linear(width, width), middle, nn.Linear(width, 3)

    def forward(self, x: Any, edges: Any) -> Any:
        return self.last(self.middle(self.inlet(x).relu(), edges).relu())


@model
def open_clip() -> Any:
    def make() -> Made:
        import open_clip

        vision = {"image_size": 32, "layers": 2, "width": 32, "patch_size": 8, "head_width": 8}
        text = {"context_length": 16, "vocab_size": 16, "width": 32, "heads": 4, "layers": 2}
        return open_clip.model.CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text), {"image": IMAGE(), "text": WORDS()}

    yield "clip", make


@model
def torchvision() -> Any:
    def make(name: str, size: int = 64, **options: Any) -> Made:
        import torchvision.models as t

        return getattr(t, name)(weights=None, **options), noise(1, 3, size, size)()

    names = "resnet18 mobilenet_v3_small shufflenet_v2_x0_5 squeezenet1_1 mnasnet0_5 efficientnet_b0 regnet_y_400mf"
    for name in names.split():
        yield name, lambda name=name: make(name)

    def swin() -> Made:
        from torchvision.models.swin_transformer import SwinTransformer

        net = SwinTransformer([4, 4], 16, [2, 2], [2, 2], [4, 4], num_classes=5)
        return net, noise(1, 3, 32, 32)()

    yield "swin", swin


@model
def segmentation_models_pytorch() -> Any:
    def make(kind: str) -> Made:
        import segmentation_models_pytorch as smp

        return getattr(smp, kind)("resnet18", encoder_weights=None, classes=3), noise(2, 3, 64, 64)()

    for kind in ("Unet", "FPN", "MAnet", "Linknet"):
        yield kind, lambda kind=kind: make(kind)


@model
def monai() -> Any:
    def make(kind: str, **options: Any) -> Made:
        import monai.networks.nets as nets

        return getattr(nets, kind)(**options), noise(2, 1, 32, 32)()

    yield (
        "unet",
        lambda: make(
            "UNet", spatial_dims=2, in_channels=1, out_channels=3, channels=(8, 16, 32), strides=(2, 2), num_res_units=1
        ),
    )
    yield "dynunet", lambda: make("BasicUNet", spatial_dims=2, in_channels=1, out_channels=3, features=(8,) * 6)
    yield (
        "vit",
        lambda: make(
            "ViT",
            in_channels=1,
            img_size=32,
            patch_size=8,
            hidden_size=32,
            mlp_dim=48,
            num_layers=2,
            num_heads=4,
            classification=True,
            spatial_dims=2,
            num_classes=3,
        ),
    )


@model
def diffusers() -> Any:
    def transformer() -> Made:
        from diffusers import DiTTransformer2DModel

        net = DiTTransformer2DModel(
            num_attention_heads=4,
            attention_head_dim=8,
            in_channels=4,
            out_channels=8,
            num_layers=2,
            sample_size=8,
            num_embeds_ada_norm=10,
            norm_num_groups=4,
        )
        labels = torch.tensor([1, 2])
        return net, {"hidden_states": noise(2, 4, 8, 8)(), "timestep": labels, "class_labels": labels}

    def unet() -> Made:
        from diffusers import UNet2DConditionModel

        net = UNet2DConditionModel(
            sample_size=8,
            in_channels=4,
            out_channels=4,
            block_out_channels=(16, 32),
            layers_per_block=1,
            cross_attention_dim=16,
            attention_head_dim=8,
            norm_num_groups=8,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        )
        return net, {
            "sample": noise(2, 4, 8, 8)(),
            "timestep": torch.tensor([3, 4]),
            "encoder_hidden_states": noise(2, 5, 16)(),
        }

    def autoencoder() -> Made:
        from diffusers import AutoencoderKL

        net = AutoencoderKL(block_out_channels=(16, 16), norm_num_groups=8, latent_channels=4, sample_size=16)
        return net, SMALL()

    yield "dit", transformer
    yield "unet", unet
    yield "vae", autoencoder


@model
def e3nn() -> Any:
    def make() -> Made:
        from e3nn.nn import FullyConnectedNet

        return FullyConnectedNet([8, 16, 16, 3], torch.relu), noise(4, 8)()

    yield "mlp", make


@model
def mamba_minimal() -> Any:
    def make() -> Made:
        from model import Mamba, ModelArgs

        return Mamba(ModelArgs(d_model=32, n_layer=2, vocab_size=16)), WORDS()

    yield "mamba", make


@model
def nanochat() -> Any:
    def make() -> Made:
        from nanochat.gpt import GPT, GPTConfig

        net = GPT(GPTConfig(sequence_len=16, vocab_size=16, n_layer=2, n_head=4, n_kv_head=2, n_embd=32))
        net.init_weights()
        return net, WORDS()

    yield "gpt", make


@model
def stable_baselines3() -> Any:
    def make(algorithm: str, environment: str, **options: Any) -> Made:
        import stable_baselines3 as s

        agent = getattr(s, algorithm)("MlpPolicy", environment, **options)
        state = torch.as_tensor(agent.env.observation_space.sample())[None].float().repeat(3, 1)
        return agent.policy, state

    yield "ppo", lambda: make("PPO", "CartPole-v1")
    yield "dqn", lambda: make("DQN", "CartPole-v1")


@model
def sb3_contrib() -> Any:
    def make() -> Made:
        import sb3_contrib as s

        agent = s.QRDQN("MlpPolicy", "CartPole-v1", policy_kwargs={"n_quantiles": 5})
        return agent.policy.quantile_net, noise(3, 4)()

    yield "qrdqn", make


@model
def torchcrepe() -> Any:
    def make() -> Made:
        from torchcrepe.model import Crepe

        return Crepe("tiny"), noise(2, 1024)()

    yield "tiny", make
