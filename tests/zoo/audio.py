"""Audio models of `transformers` with tiny configurations; raw waveforms have a dynamic length."""

from __future__ import annotations

import transformers as hf
from torch import nn

from tests.zoo.encoders import TINY
from tests.zoo.entry import floats, model

_WAVE = floats("input_values", "batch", "samples")
_SPEECH = {name: value for name, value in TINY.items() if name != "max_position_embeddings"} | {
    "conv_dim": (8, 8, 8),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}


@model("wav2vec2", "audio", _WAVE)
def wav2vec2() -> nn.Module:
    return hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**_SPEECH))


@model("hubert", "audio", _WAVE)
def hubert() -> nn.Module:
    return hf.HubertModel(hf.HubertConfig(**_SPEECH))


@model("wavlm", "audio", _WAVE)
def wavlm() -> nn.Module:
    return hf.WavLMModel(hf.WavLMConfig(**_SPEECH, num_buckets=8, max_bucket_distance=16))


@model("sew", "audio", _WAVE)
def sew() -> nn.Module:
    return hf.SEWModel(hf.SEWConfig(**_SPEECH, squeeze_factor=2))


@model("whisper_encoder", "audio", floats("input_features", "batch", 16, 40))
def whisper_encoder() -> nn.Module:
    config = hf.WhisperConfig(
        vocab_size=64, num_mel_bins=16, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_source_positions=20,
        max_target_positions=16, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    return hf.WhisperModel(config).get_encoder()


@model("ast", "audio", floats("input_values", "batch", 40, 16))
def ast() -> nn.Module:
    config = {name: value for name, value in TINY.items() if name not in ("vocab_size", "max_position_embeddings")}
    return hf.ASTForAudioClassification(
        hf.ASTConfig(
            **config, patch_size=8, frequency_stride=4, time_stride=8, max_length=40, num_mel_bins=16, num_labels=5
        )
    )
