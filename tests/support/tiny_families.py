"""Every transformers class that can be built tiny from its config, with one batch that its forward takes.

Nothing is written per family: widths, depths and sizes in a config (and in the configs inside it) are shrunk by the
words of their names, and inputs follow the words of the forward's signature. What does not fit is reported, not built.
"""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 64
MOST_NUMBERS = 12_000_000
_SIZES: tuple[tuple[str, int], ...] = (
    (
        r".*vocab_size|num_embeddings|codebook_size|n_vocab|vocab_size_or_config_json_file|semantic_vocab_size",
        VOCABULARY,
    ),
    (
        r"(num|n)_(hidden_)?layers?|.*(encoder|decoder)_layers|depth|num_blocks|num_.*_layers|.*_depth|num_decoder_blocks",
        2,
    ),
    (
        r"num_(attention_|.*_attention_)?heads|n_heads?|(encoder|decoder)_attention_heads|num_head|num_.*_attention_heads",
        4,
    ),
    (r"num_key_value_heads|num_kv_heads|multi_query_group_num", 2),
    (r"head_dim|d_kv|attention_head_size|.*_head_dim|d_head|dim_head|v_head_dim", 8),
    (r"hidden_size|d_model|n_embd|embed_dim|dim|embedding_size|emb_dim|projection_dim|hidden_dim|width|n_hidden", 32),
    (
        r"intermediate_size|.*ffn_dim|d_ff|n_inner|ffn_hidden_size|moe_intermediate_size|.*_intermediate_size|.*ff_dim",
        48,
    ),
    (r"num_(local_|routed_|n_routed_)?experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok|moe_k|moe_topk", 2),
    (r"max_position_embeddings|n_positions|max_.*position.*|max_seq_len|max_sequence_length", 128),
    (r"image_size|img_size|input_size", 32),
    (r"patch_size|stem_patch_size", 8),
    (r"kv_lora_rank|q_lora_rank", 16),
    (r"qk_nope_head_dim|qk_rope_head_dim", 8),
    (r"num_labels|num_classes", 5),
)
_KEPT = re.compile(r".*_token_id|.*_index|.*_ratio|num_channels|pad.*|torch_dtype|initializer_range")


def classes() -> list[type]:
    """Every public model class of transformers that has a config and a head of its own, by name."""
    import transformers

    names = [n for n in dir(transformers) if re.search(r"For[A-Z]|LMHead|Head(s)?Model|Model$|WithLMHead", n)]
    found = []
    for name in sorted(names):
        if name.startswith(("Auto", "TF", "Flax")) or name.endswith("PreTrainedModel"):
            continue
        try:
            cls = getattr(transformers, name)
        except (ImportError, AttributeError):  # needs a package that is not here
            continue
        if inspect.isclass(cls) and issubclass(cls, nn.Module) and getattr(cls, "config_class", None) is not None:
            found.append(cls)
    return found


def build(cls: type) -> nn.Module:
    """A tiny model of the class, with the same weights each time; raises what its constructor raises."""
    kind: Any = cls
    error: Exception | None = None
    for how in (_by_words, _by_words_without_lists, _as_it_is):
        try:
            config = how(kind.config_class)
            with torch.device("meta"):
                size = sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
            if size > MOST_NUMBERS:
                raise ValueError(f"{size} numbers are not tiny")
            with torch.random.fork_rng(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.manual_seed(0)
                model: nn.Module = kind(config)
            for parameter in model.parameters():  # zeros and ones would hide what depends on what
                if parameter.is_floating_point() and parameter.dim() > 1:
                    nn.init.normal_(parameter.data, std=0.1, generator=torch.Generator().manual_seed(1))
            return model.eval()
        except Exception as raised:
            error = raised
    assert error is not None
    raise error


def _by_words(config_class: Any) -> Any:
    return _shrunk(config_class())


def _by_words_without_lists(config_class: Any) -> Any:
    return _shrunk(config_class(), lists=False)


def _as_it_is(config_class: Any) -> Any:
    fields = {k: v for k, v in _changes(config_class()).items() if not isinstance(v, list)}
    return config_class(**fields)


def _shrunk(config: Any, lists: bool = True) -> Any:
    config = copy.deepcopy(config)
    inner = {k: v for k, v in vars(config).items() if hasattr(v, "to_dict") and hasattr(v, "model_type")}
    for name, part in inner.items():
        object.__setattr__(config, name, _shrunk(part, lists))
    for name, value in _changes(config).items():
        if isinstance(value, list) and not lists:
            continue
        try:
            setattr(config, name, value)
        except (AttributeError, NotImplementedError, ValueError, TypeError):
            continue
    for name in ("use_cache", "output_attentions", "output_hidden_states"):
        if hasattr(config, name):
            setattr(config, name, False)
    special = [n for n, v in vars(config).items() if n.endswith("_token_id") and type(v) is int and v >= VOCABULARY]
    for i, name in enumerate(special):  # above the tokens of the batches
        setattr(config, name, VOCABULARY - 1 - i % 4)
    if getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0
    if getattr(config, "rotary_dim", None):
        config.rotary_dim = 4
    config._attn_implementation = "eager"
    return config


def _changes(config: Any) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, bool) or _KEPT.fullmatch(name):
            continue
        if isinstance(value, int):
            for words, size in _SIZES:
                if re.fullmatch(words, name) and value > size:
                    changes[name] = size
                    break
        elif isinstance(value, list) and name.endswith(("layer_types", "layers_types", "layers_block_type")):
            changes[name] = value[:2]
        elif isinstance(value, list) and value and all(type(v) is int for v in value):
            if re.search(r"hidden_sizes|embed_dims?|channels|dims|hidden_dim", name):
                changes[name] = [min(v, 16 * (i + 1)) for i, v in enumerate(value)]
            elif re.search(r"depths|layers|num_blocks", name):
                changes[name] = [min(v, 2) for v in value]
    return changes


def batch(model: nn.Module) -> dict[str, Any]:
    """One batch by the words of the forward's signature; only what it cannot do without, and its main input."""
    config: Any = model.config
    forward = inspect.signature(model.forward).parameters
    main = _main_input(model)
    wanted = [n for n, p in forward.items() if p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD]
    wanted += [main] if main in forward and main not in wanted else []
    wanted += [
        n for n in ("input_ids", "pixel_values", "decoder_input_ids", "bbox") if n in forward and n not in wanted
    ]
    made = {name: _input(name, config) for name in wanted}
    if "MultipleChoice" in type(model).__name__ and "input_ids" in made:
        made["input_ids"] = made["input_ids"][:, None].expand(2, 3, 8).clone()
    if "use_cache" in forward:
        made["use_cache"] = False
    return {name: value for name, value in made.items() if value is not None}


def batches(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Several guesses, the likeliest first: with every main input, with the first alone, with both modalities."""
    whole = batch(model)
    yield whole
    main = _main_input(model)
    if main in whole:
        yield {k: v for k, v in whole.items() if k in (main, "use_cache")}
        with_decoder = (main, "use_cache", "decoder_input_ids")
        yield {k: v for k, v in whole.items() if k in with_decoder}
    for size in (16, 64, 224):
        if "pixel_values" in whole:
            channels = whole["pixel_values"].shape[1]
            yield {**whole, "pixel_values": _noise(2, channels, size, size)}
    forward = inspect.signature(model.forward).parameters
    if "input_features" in forward:
        yield {"input_features": _noise(1, 80, 3000)} | {
            k: v for k, v in whole.items() if k in ("decoder_input_ids", "use_cache")
        }
    if "input_values" in forward:
        yield {"input_values": _noise(1, 1, 8000)}


def _main_input(model: nn.Module) -> str:
    named: Any = getattr(model, "main_input_name", "input_ids")
    return named if isinstance(named, str) else str(next(iter(named), "input_ids"))  # some classes list several


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def _number(config: Any, *names: str, otherwise: int) -> int:
    for part in (config, *(v for v in vars(config).values() if hasattr(v, "model_type"))):
        for name in names:
            value = getattr(part, name, None)
            if isinstance(value, list | tuple) and value and isinstance(value[0], int):
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return otherwise


def _input(name: str, config: Any) -> Any:
    draws = torch.Generator().manual_seed(3)
    tokens = min(_number(config, "vocab_size", otherwise=VOCABULARY), VOCABULARY) - 4
    size = _number(config, "image_size", "img_size", otherwise=32)
    channels = _number(config, "num_channels", "in_channels", "in_chans", otherwise=3)
    if re.fullmatch(r"(decoder_|query_|text_)?input_ids|question_input_ids|node_input", name):
        return torch.randint(3, max(tokens, 4), (2, 8), generator=draws)
    if name == "bbox":
        return torch.tensor([1, 2, 3, 4]).expand(2, 8, 4).clone()
    if name in ("pixel_values", "image", "images"):
        return _noise(2, channels, size, size)
    if name == "pixel_values_videos":
        return _noise(1, _number(config, "num_frames", otherwise=4), channels, size, size)
    if name in ("input_values", "waveform", "audio_values"):
        return _noise(2, 4000)
    if name in ("input_features", "features", "spectrogram"):
        return _noise(2, 32, _number(config, "num_mel_bins", "input_dim", "feature_size", otherwise=80))
    if name == "attention_mask":
        return torch.ones(2, 8, dtype=torch.long)
    if name == "past_values":
        length = _number(config, "context_length", otherwise=16)
        lags = getattr(config, "lags_sequence", None)
        length += max(lags) if lags else 0
        wide = _number(config, "num_input_channels", "input_size", otherwise=1)
        return _noise(2, length, wide) if wide > 1 or not lags else _noise(2, length)
    if name in ("past_time_features", "past_observed_mask"):
        length = _number(config, "context_length", otherwise=16) + max(getattr(config, "lags_sequence", None) or [0])
        if name == "past_observed_mask":
            return torch.ones(2, length)
        wide = _number(config, "num_time_features", otherwise=0) + 1
        return _noise(2, length, wide)
    if name in ("hidden_states", "inputs_embeds", "sample", "encoder_hidden_states"):
        return _noise(2, 8, _number(config, "hidden_size", "d_model", otherwise=32))
    return None
