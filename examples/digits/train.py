"""Train the digits network and write a self-describing checkpoint folder.

python examples/digits/train.py examples/digits/checkpoint
"""

import sys
from pathlib import Path

import torch
from model import build
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from deployer.checkpoint import save_checkpoint
from deployer.spec import Dim, ModelSpec, TensorSpec

WIDTH = 16
EPOCHS = 20
BATCH_SIZE = 64
SAMPLES = 32


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return (model(image=images)["logits"].argmax(1) == labels).float().mean().item()


def main(folder: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # too small a network to share out; threads would only wait for each other
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, test = train_test_split(range(len(images)), test_size=0.2, random_state=0, stratify=labels)
    model = build(width=WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-2, total_steps=EPOCHS * -(-len(train) // BATCH_SIZE)
    )
    for epoch in range(EPOCHS):
        model.train()
        for rows in torch.tensor(train)[torch.randperm(len(train))].split(BATCH_SIZE):
            loss = nn.functional.cross_entropy(model(image=images[rows])["logits"], labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        if (epoch + 1) % 5 == 0:
            held_out = accuracy(model, images[test], labels[test])
            print(f"epoch {epoch + 1:2d}  loss {loss.item():.4f}  held-out accuracy {held_out:.4f}")
    reached = accuracy(model, images[test], labels[test])
    if reached < 0.97:
        sys.exit(f"held-out accuracy {reached:.4f} is below 0.97; the checkpoint was not written")
    spec = ModelSpec(
        name="digits",
        inputs=(TensorSpec("image", "float32", ("batch", 1, 8, 8)),),
        dims={"batch": Dim(min=1, typical=8, max=64)},
        batch="batch",
        labels=tuple("0123456789"),
    )
    save_checkpoint(
        folder,
        model,
        factory=f"{Path(__file__).with_name('model.py')}:build",
        args={"width": WIDTH},
        spec=spec,
        samples={"image": images[test[:SAMPLES]].numpy()},
        step=EPOCHS,
    )
    print(f"held-out accuracy {reached:.4f} on {len(test)} images; wrote {folder}")


if __name__ == "__main__":
    main(sys.argv[1])
