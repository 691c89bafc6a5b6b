"""A small GPT on the characters of Shakespeare by backpropagation or by a rule without weight transport.

    python examples/gpt_characters.py tinyshakespeare.txt --rule dll:kolen-pollack

The model is ordinary PyTorch: embeddings, and blocks of attention and an MLP with LayerNorm and skip connections. The line
that differs from ordinary training is `apical.make`: `loss.backward()` then is the rule, inside of attention, too.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from experiment import compute_gradient_norm, describe_run, make_parser, measure_alignment, print_row
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

import apical


class Block(nn.Module):
    """Causal self-attention and an MLP, each after a LayerNorm and with a skip connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(0.2)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2 * self.training, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, time, width)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """A Transformer that predicts the next character at every position."""

    def __init__(self, characters: int, context: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(characters, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.dropout, self.norm = nn.Dropout(0.2), nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.characters(text) + self.positions.weight[: text.shape[1]]
        return self.head(self.norm(self.blocks(self.dropout(x))))


def compute_loss(model: nn.Module, codes: Tensor, following: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy of the following characters, in bfloat16 on a GPU."""
    with torch.autocast(codes.device.type, torch.bfloat16, enabled=codes.is_cuda):
        return F.cross_entropy(model(codes).flatten(0, 1).float(), following.flatten(), reduction=reduction)


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor, context: int) -> float:
    """Return the mean loss over all characters of a text, in windows side by side. Padding counts as no character."""
    padding = (0, -(len(text) - 1) % context)
    inputs = F.pad(text[:-1], padding).view(-1, context).split(64)
    following = F.pad(text[1:], padding, value=-100).view(-1, context).split(64)
    losses = [compute_loss(model, *batch, reduction="sum") for batch in zip(inputs, following, strict=True)]
    return torch.stack(losses).sum().item() / (len(text) - 1)


def main() -> None:
    parser = make_parser(__doc__, decays=(2.0, 0.1, 0.4))
    parser.add_argument("text", type=Path, help="a file of plain text")
    for name, value in {"steps": 5000, "batch": 64, "context": 256, "width": 256, "depth": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=1e-3, help="the largest rate of the one-cycle schedule")
    parser.add_argument("--decay", type=float, default=0.1, help="weight decay of the weights of products")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    characters = torch.tensor([ord(character) for character in args.text.read_text("utf-8")], device=device)
    vocabulary, codes = characters.unique(return_inverse=True)
    train, validation = codes.tensor_split([len(codes) * 9 // 10])
    torch.manual_seed(args.seed)
    model = GPT(len(vocabulary), args.context, args.width, args.depth, heads=max(1, args.width // 64))
    own = {"readout": {"head": "head"}, "dll:kolen-pollack": {"theta_std": 0.02}}.get(args.rule, {})  # Θ spread as W
    learner = apical.make(args.rule, model, example=train[None, : args.context].cpu(), **own).to(device)
    torch.manual_seed(args.seed)  # all rules see the same batches
    groups = learner.param_groups(args.lr, weight_decay=args.decay)
    for group in groups:
        if group["name"] == "bias":  # biases, gains and embeddings
            group["weight_decay"] = 0.0
    optim = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device == "cuda")
    schedules = [OneCycleLR(optim, [g["lr"] for g in groups], args.steps, pct_start=0.1, cycle_momentum=False)]
    if args.rule == "dll:kolen-pollack":
        schedules.append(
            apical.DecayScheduler(optim, [(0, args.early_decay), (args.early_share, args.late_decay)], args.steps)
        )
    forward = torch.compile(learner) if args.compile else learner
    print_row(describe_run(args), args.out)
    window = torch.arange(args.context, device=device)
    for step in range(1, args.steps + 1):
        learner.train()
        places = torch.randint(len(train) - args.context, (args.batch, 1), device=device) + window
        loss = compute_loss(forward, train[places], train[places + 1])
        optim.zero_grad()
        loss.backward()
        norm = compute_gradient_norm(model)
        nn.utils.clip_grads_with_norm_(learner.parameters(), 1.0, norm)  # W and Θ by the same factor
        optim.step()
        for schedule in schedules:
            schedule.step()
        if step % max(1, args.steps // 20) == 0 or step == args.steps:
            learner.eval()
            row = {"step": step, "loss": loss.item(), "validation": evaluate(learner, validation, args.context)}
            print_row({**row, "alignment": measure_alignment(learner), "gradient_norm": norm.item()}, args.out)


if __name__ == "__main__":
    main()
