"""A language model in plain PyTorch on the standard library's text.  It knows of no engine:

    python examples/plain_torch.py
    offload-train --auto --nvme /mnt/nvme examples/plain_torch.py        # the same, out of core

Writes the trained weights and the optimizer's state to --out.
"""

import argparse
import pydoc_data.topics

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_2(x))


class LanguageModel(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, layers, width, heads, length):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.place = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens) + self.place[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def read_text():
    text = "".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics))
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    split = len(data) * 9 // 10
    return data[:split], data[split:]


def batches(data, args, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - args.length - 1, (args.batch,), generator=generator)
        rows = torch.stack([data[start : start + args.length + 1] for start in starts])
        yield rows[:, :-1], rows[:, 1:]


def loss_of(model, inputs, targets):
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(model, data, args):
    model.eval()
    found = batches(data, args, seed=1)
    losses = [loss_of(model, *next(found)).item() for _ in range(4)]
    model.train()
    return sum(losses) / len(losses)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--eval-every", type=int, default=20)
    parser.add_argument("--out", default="plain_torch.pt")
    args = parser.parse_args()

    torch.manual_seed(0)
    training, validation = read_text()
    model = LanguageModel(args.layers, args.width, args.heads, args.length)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=args.lr,
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps + 1)

    found = batches(training, args, seed=0)
    for step in range(1, args.steps + 1):
        for _ in range(args.accumulation):
            loss = loss_of(model, *next(found))
            (loss / args.accumulation).backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        print(f"step {step} loss {loss.item():.6f} norm {norm.item():.6f}")
        if step % args.eval_every == 0:
            print(f"step {step} validation {evaluate(model, validation, args):.6f}")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.out)


if __name__ == "__main__":
    main()
