"""Text encoders of `transformers` with tiny configurations, and encoder-decoders without a cache."""

from __future__ import annotations

import transformers as hf
from torch import nn

from tests.zoo.entry import TOKENS, ids, integers, model, right_padded

TINY = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
}


@model("bert", "encoder", *TOKENS)
def bert() -> nn.Module:
    return hf.BertModel(hf.BertConfig(**TINY))


@model("bert_classifier", "encoder", *TOKENS, integers("token_type_ids", "batch", "sequence", high=2))
def bert_classifier() -> nn.Module:
    return hf.BertForSequenceClassification(hf.BertConfig(**TINY, num_labels=3))


@model("roberta", "encoder", *TOKENS)
def roberta() -> nn.Module:
    return hf.RobertaModel(hf.RobertaConfig(**TINY))


@model("distilbert", "encoder", *TOKENS)
def distilbert() -> nn.Module:
    return hf.DistilBertModel(
        hf.DistilBertConfig(vocab_size=64, dim=16, n_layers=1, n_heads=2, hidden_dim=24, max_position_embeddings=40)
    )


@model("albert", "encoder", *TOKENS)
def albert() -> nn.Module:
    return hf.AlbertModel(hf.AlbertConfig(**TINY, embedding_size=8))


@model("electra", "encoder", *TOKENS)
def electra() -> nn.Module:
    return hf.ElectraModel(hf.ElectraConfig(**TINY, embedding_size=8))


@model("mpnet", "encoder", *TOKENS)
def mpnet() -> nn.Module:
    return hf.MPNetModel(hf.MPNetConfig(**TINY))


@model("deberta_v2", "encoder", *TOKENS)
def deberta_v2() -> nn.Module:
    return hf.DebertaV2Model(
        hf.DebertaV2Config(
            **TINY, relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"], type_vocab_size=0
        )
    )


@model("modernbert", "encoder", *TOKENS)
def modernbert() -> nn.Module:
    return hf.ModernBertModel(
        hf.ModernBertConfig(
            **TINY | {"num_hidden_layers": 2},
            local_attention=4,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=1,
        )
    )


# It joins each token to its neighbours by slices that are empty for a single token: two and more.
@model("mobilebert", "encoder", ids("input_ids", "batch", "words"), right_padded(length="words"))
def mobilebert() -> nn.Module:
    return hf.MobileBertModel(hf.MobileBertConfig(**TINY, intra_bottleneck_size=16, embedding_size=16))


@model("squeezebert", "encoder", *TOKENS)
def squeezebert() -> nn.Module:
    return hf.SqueezeBertModel(hf.SqueezeBertConfig(**TINY, embedding_size=16))


@model("convbert", "encoder", *TOKENS)
def convbert() -> nn.Module:
    return hf.ConvBertModel(hf.ConvBertConfig(**TINY, embedding_size=16, conv_kernel_size=3, head_ratio=2))


@model("roformer", "encoder", *TOKENS)
def roformer() -> nn.Module:
    return hf.RoFormerModel(hf.RoFormerConfig(**TINY, embedding_size=16))


@model("fnet", "encoder", ids("input_ids", "batch", "sequence"))
def fnet() -> nn.Module:
    config = {name: value for name, value in TINY.items() if name != "num_attention_heads"}
    return hf.FNetModel(hf.FNetConfig(**config))


@model("esm", "encoder", *TOKENS)
def esm() -> nn.Module:
    return hf.EsmModel(hf.EsmConfig(**TINY, pad_token_id=1, position_embedding_type="rotary"))


@model("clip_text", "encoder", *TOKENS)
def clip_text() -> nn.Module:
    return hf.CLIPTextModel(hf.CLIPTextConfig(**TINY, projection_dim=8, eos_token_id=2, bos_token_id=1))


@model("t5_encoder", "encoder", *TOKENS)
def t5_encoder() -> nn.Module:
    return hf.T5EncoderModel(
        hf.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, use_cache=False)
    )


@model("t5", "encoder-decoder", *TOKENS, ids("decoder_input_ids", "batch", "rows"))
def t5() -> nn.Module:
    return hf.T5Model(
        hf.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, use_cache=False)
    )


_SEQ2SEQ = {
    "vocab_size": 64,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 40,
    "use_cache": False,
}


@model("bart_encoder", "encoder", *TOKENS)
def bart_encoder() -> nn.Module:
    return hf.BartModel(hf.BartConfig(**_SEQ2SEQ)).get_encoder()


@model("bart", "encoder-decoder", *TOKENS, ids("decoder_input_ids", "batch", "rows"))
def bart() -> nn.Module:
    return hf.BartModel(hf.BartConfig(**_SEQ2SEQ))


@model("m2m100_encoder", "encoder", ids("input_ids", "batch", "sequence"), right_padded())
def m2m100_encoder() -> nn.Module:
    return hf.M2M100Model(hf.M2M100Config(**_SEQ2SEQ)).get_encoder()
