"""Decoders of `transformers` without a cache: all tokens in, logits or states of all tokens out."""

from __future__ import annotations

import transformers as hf
from torch import nn

from tests.zoo.entry import TOKENS, model

_LLAMA = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "use_cache": False,
}
_PLAIN = {name: value for name, value in _LLAMA.items() if name != "num_key_value_heads"}
_GPT = {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 40, "use_cache": False}


@model("gpt2", "decoder", *TOKENS)
def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(hf.GPT2Config(**_GPT))


@model("gpt_neo", "decoder", *TOKENS)
def gpt_neo() -> nn.Module:
    return hf.GPTNeoModel(
        hf.GPTNeoConfig(
            vocab_size=64, hidden_size=16, num_layers=2, attention_types=[[["global", "local"], 1]], num_heads=2,
            window_size=4, max_position_embeddings=40, use_cache=False,
        )
    )  # fmt: skip


@model("gpt_neox", "decoder", *TOKENS)
def gpt_neox() -> nn.Module:
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**_PLAIN))


@model("gptj", "decoder", *TOKENS)
def gptj() -> nn.Module:
    return hf.GPTJForCausalLM(hf.GPTJConfig(**_GPT, rotary_dim=4))


@model("opt", "decoder", *TOKENS)
def opt() -> nn.Module:
    return hf.OPTForCausalLM(
        hf.OPTConfig(
            vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=24,
            word_embed_proj_dim=16, max_position_embeddings=40, use_cache=False,
        )
    )  # fmt: skip


@model("llama", "decoder", *TOKENS)
def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_LLAMA))


@model("mistral", "decoder", *TOKENS)
def mistral() -> nn.Module:
    return hf.MistralForCausalLM(hf.MistralConfig(**_LLAMA, sliding_window=4))


@model("qwen2", "decoder", *TOKENS)
def qwen2() -> nn.Module:
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**_LLAMA))


@model("qwen3", "decoder", *TOKENS)
def qwen3() -> nn.Module:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**_LLAMA, head_dim=8))


@model("phi", "decoder", *TOKENS)
def phi() -> nn.Module:
    return hf.PhiForCausalLM(hf.PhiConfig(**_LLAMA))


@model("gemma", "decoder", *TOKENS)
def gemma() -> nn.Module:
    return hf.GemmaForCausalLM(hf.GemmaConfig(**_LLAMA, head_dim=4))


@model("gemma2", "decoder", *TOKENS)
def gemma2() -> nn.Module:
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(**_LLAMA | {"num_hidden_layers": 2}, head_dim=4, sliding_window=4))


@model("falcon", "decoder", *TOKENS)
def falcon() -> nn.Module:
    return hf.FalconForCausalLM(
        hf.FalconConfig(
            vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=40,
            use_cache=False,
        )
    )  # fmt: skip


@model("bloom", "decoder", *TOKENS)
def bloom() -> nn.Module:
    return hf.BloomForCausalLM(hf.BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2, use_cache=False))


@model("mixtral", "decoder", *TOKENS)
def mixtral() -> nn.Module:
    return hf.MixtralForCausalLM(
        hf.MixtralConfig(**_LLAMA, num_local_experts=4, num_experts_per_tok=2, experts_implementation="batched_mm")
    )
