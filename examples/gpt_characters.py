"""A small GPT on the characters of Shakespeare by backpropagation or by a rule without weight transport.

    python examples/gpt_characters.py tinyshakespeare.txt --rule dll:kolen-pollack

The model is ordinary PyTorch: embeddings, and blocks of attention and an MLP with LayerNorm and skip connections. The only
line that differs from ordinary training is `apical.make`: `loss.backward()` then is the rule, inside of attention, too.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apical


class Block(nn.Module):
    """Causal self-attention and an MLP, each after a LayerNorm and with a skip connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, time, width)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """A Transformer that predicts the next character at every position."""

    def __init__(self, characters: int, context: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(characters, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.characters(text) + self.positions.weight[: text.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a file of plain text, such as the one that `apical data fetch` writes")
    parser.add_argument("--rule", default="dll:kolen-pollack", help="bp, dll:kolen-pollack, sign, fa, readout, …")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--decay", type=float, default=0.1, help="AdamW's decay of the weights, and Kolen-Pollack's λ")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = args.text.read_text("utf-8")
    vocabulary = {character: k for k, character in enumerate(sorted(set(text)))}
    codes = torch.tensor([vocabulary[character] for character in text], device=device)
    cut = len(codes) * 9 // 10
    train, validation = codes[:cut], codes[cut:]
    torch.manual_seed(args.seed)
    model = GPT(len(vocabulary), args.context, args.width, args.depth, heads=max(1, args.width // 64))
    options = {"head": "head"} if args.rule == "readout" else {}
    if args.rule == "dll:kolen-pollack":
        options = {"decay": args.decay}
    learner = apical.make(args.rule, model, example=train[None, : args.context].cpu(), **options).to(device)
    optim = torch.optim.AdamW(learner.param_groups(args.lr, weight_decay=args.decay), betas=(0.9, 0.95))
    rates = [group["lr"] for group in optim.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optim, rates, args.steps, pct_start=0.1, cycle_momentum=False)
    forward = torch.compile(learner) if args.compile else learner
    window = torch.arange(args.context, device=device)

    def compute_loss(codes: Tensor, starts: Tensor) -> Tensor:
        places = starts.unsqueeze(1) + window
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return F.cross_entropy(forward(codes[places]).flatten(0, 1).float(), codes[places + 1].flatten())

    start = time.time()
    for step in range(1, args.steps + 1):
        learner.train()
        loss = compute_loss(train, torch.randint(0, len(train) - args.context - 1, (args.batch,), device=device))
        optim.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        schedule.step()
        if step % max(1, args.steps // 10) == 0:
            learner.eval()
            starts = torch.arange(0, len(validation) - args.context - 1, args.context, device=device)
            with torch.no_grad():
                losses = [compute_loss(validation, part) for part in starts[: len(starts) // 64 * 64 or None].split(64)]
            row = {
                "step": step,
                "loss": round(float(loss), 4),
                "validation": round(float(sum(losses)) / len(losses), 4),
            }
            print(json.dumps(row | {"seconds": round(time.time() - start, 1)}), flush=True)


if __name__ == "__main__":
    main()
