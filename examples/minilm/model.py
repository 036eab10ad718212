"""The sentence encoder all-MiniLM-L6-v2: transformers' BERT, mean pooling over the mask, vectors of length 1."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel


class SentenceEncoder(BertModel):
    """input_ids and attention_mask, int64 (batch, sequence) → embedding, float32 (batch, hidden_size), length 1.

    A subclass, so that its weights have the names of the published `model.safetensors`, the unused pooler among them.
    A row whose mask is all zero has nothing to average and gives the zero vector.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        # A weight in the published file; transformers 5 keeps it out of the state dict.
        positions = torch.arange(config.max_position_embeddings).unsqueeze(0)
        self.embeddings.register_buffer("position_ids", positions, persistent=True)
        self.loss_function = None  # tracing reads every property; unset, this one logs a warning

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        tokens = super().forward(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(tokens.dtype)
        mean = (tokens * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1e-9)
        return {"embedding": nn.functional.normalize(mean, dim=1)}


def build(**config: Any) -> SentenceEncoder:
    """The encoder with random weights; `config` holds fields of BERT's config.json."""
    return SentenceEncoder(BertConfig(**config))
