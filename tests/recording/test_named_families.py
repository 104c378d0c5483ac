"""Classes of transformers whose outputs a reader of source missed, each judged by the autograd graph of its run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from oracle import Truth, mistakes

transformers = pytest.importorskip("transformers")
SMALL = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
SMALL |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
Made = tuple[nn.Module, dict[str, Any]]
MODELS: dict[str, Callable[[], Made]] = {}


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, 30, shape, generator=torch.Generator().manual_seed(0))


def model(make: Callable[[], Made]) -> Callable[[], Made]:
    MODELS[make.__name__] = make
    return make


def forecaster(name: str, **more: Any) -> Made:
    config = getattr(transformers, f"{name}Config")(
        prediction_length=4, context_length=8, lags_sequence=[1, 2], num_time_features=1, **SMALL, **more
    )
    past, future = 10, 4
    batch = {"past_values": noise(2, past), "past_time_features": noise(2, past, 1)}
    batch |= {"past_observed_mask": torch.ones(2, past), "future_values": noise(2, future)}
    batch |= {"future_time_features": noise(2, future, 1), "use_cache": False}
    return getattr(transformers, f"{name}ForPrediction")(config), batch


@model
def time_series_transformer() -> Made:
    return forecaster("TimeSeriesTransformer")


@model
def informer() -> Made:
    return forecaster("Informer", sampling_factor=2)


@model
def autoformer() -> Made:
    return forecaster("Autoformer", label_length=2, moving_average=3)


@model
def timesfm() -> Made:
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.TimesFmConfig(
        patch_length=4, context_length=16, horizon_length=4, head_dim=8, quantiles=[0.1, 0.9], **size
    )
    return transformers.TimesFmModelForPrediction(config), {"past_values": [noise(16), noise(16)], "freq": [0, 0]}


@model
def xlnet() -> Made:
    config = transformers.XLNetConfig(vocab_size=32, d_model=16, n_layer=1, n_head=2, d_inner=24)
    return transformers.XLNetForQuestionAnswering(config), {"input_ids": tokens(2, 8)}


@model
def xlm() -> Made:
    config = transformers.XLMConfig(vocab_size=32, emb_dim=16, n_layers=1, n_heads=2)
    return transformers.XLMForQuestionAnswering(config), {"input_ids": tokens(2, 8)}


@model
def speecht5() -> Made:
    size = {"hidden_size": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    size |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_mel_bins": 4}
    config = transformers.SpeechT5Config(
        vocab_size=32, speech_decoder_prenet_units=16, speech_decoder_postnet_units=16, speaker_embedding_dim=8, **size
    )
    batch = {"input_ids": tokens(2, 6), "decoder_input_values": noise(2, 4, 4), "speaker_embeddings": noise(2, 8)}
    return transformers.SpeechT5ForTextToSpeech(config), {**batch, "use_cache": False}


@model
def seamless_vocoder() -> Made:
    from transformers.models.seamless_m4t.modeling_seamless_m4t import SeamlessM4TCodeHifiGan

    config = transformers.SeamlessM4TConfig(
        **{"unit_hifi_gan_vocab_size": 32, "unit_embed_dim": 8, "lang_embed_dim": 4, "spkr_embed_dim": 4},
        **{"vocoder_num_langs": 3, "vocoder_num_spkrs": 3, "upsample_initial_channel": 16},
        **{"upsample_rates": [2, 2], "upsample_kernel_sizes": [4, 4], "resblock_kernel_sizes": [3]},
        resblock_dilation_sizes=[[1, 3]],
    )
    net = SeamlessM4TCodeHifiGan(config)
    batch = {"input_ids": tokens(1, 6), "spkr_id": torch.tensor([[1]]), "lang_id": torch.tensor([[1]])}
    return net, batch


@model
def vits() -> Made:
    config = transformers.VitsConfig(
        **{"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 24},
        **{"flow_size": 16, "spectrogram_bins": 9, "prior_encoder_num_flows": 1, "prior_encoder_num_wavenet_layers": 2},
        **{"posterior_encoder_num_wavenet_layers": 2, "upsample_initial_channel": 16, "upsample_rates": [2, 2]},
        **{"upsample_kernel_sizes": [4, 4], "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3]]},
        **{
            "duration_predictor_num_flows": 2,
            "duration_predictor_filter_channels": 16,
            "depth_separable_num_layers": 1,
        },
    )
    return transformers.VitsModel(config), {"input_ids": tokens(1, 8)}


@model
def wavlm() -> Made:
    config = transformers.WavLMConfig(
        **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24},
        **{"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2},
        **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "vocab_size": 32},
    )
    return transformers.WavLMForCTC(config), {"input_values": noise(1, 400)}


@model
def tapas() -> Made:
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.TapasConfig(vocab_size=32, type_vocab_sizes=[3, 8, 8, 2, 2, 2, 2], **size)
    return transformers.TapasForQuestionAnswering(config), {"input_ids": tokens(2, 8)}


@pytest.mark.parametrize("name", MODELS)
def test_with_an_example_it_is_planned_as_it_runs(name: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net, batch = MODELS[name]()
        for parameter in net.parameters():  # zeros would hide what depends on what
            if parameter.dim() > 1:
                nn.init.normal_(parameter.data, std=0.1)
    truth = Truth.of(net.eval(), lambda: net(**batch))
    assert truth.heads
    plan = rekindle.plan(net, example=batch, targets="auto", measure="none")
    wrong = mistakes(plan.entries, truth, example=True)
    # Durations become integers, behind which the autograd graph sees nothing.
    assert [each for each in wrong if not (each.kind == "unreached" and "dur" in each.name)] == []
    assert plan.selected
