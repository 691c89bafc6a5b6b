"""ResNet-18 on CIFAR-10 by backpropagation or by a rule without weight transport, in a plain PyTorch loop.

    python examples/resnet18_cifar10.py --rule dll:kolen-pollack --epochs 60

The line that differs from ordinary training is `apical.make`: `loss.backward()` then is the rule. Kolen-Pollack's decay λ is
larger at the start of the run, where BatchNorm makes it nearly free; Θ − W shrinks as exp(−Σ rate · λ).
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from experiment import compute_gradient_norm, describe_run, make_parser, measure_alignment, print_row
from torch import Tensor, nn

import apical

MIN_STEPS = 8
"""Steps of the shortest schedule whose rate both rises and falls."""


class Block(nn.Module):
    """Two 3 × 3 convolutions with BatchNorm, and a skip connection around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.skip = nn.Sequential()
        if stride != 1 or before != after:
            self.skip = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.skip(x))


class ResNet18(nn.Module):
    """ResNet-18 for small images: the first convolution is 3 × 3 and there is no pooling after it."""

    def __init__(self, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        sizes = [width, width, 2 * width, 4 * width, 8 * width]
        blocks = []
        for stride, (before, after) in zip((1, 2, 2, 2), pairwise(sizes), strict=True):
            blocks += [Block(before, after, stride), Block(after, after, 1)]
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


def augment(images: Tensor) -> Tensor:
    """Shift each image by up to four pixels and mirror half of them."""
    n, _, height, width = images.shape
    padded = F.pad(images, (4, 4, 4, 4))
    dy, dx = torch.randint(0, 9, (2, n, 1), device=images.device)
    rows = dy + torch.arange(height, device=images.device)
    columns = dx + torch.arange(width, device=images.device)
    columns = torch.where(torch.rand(n, 1, device=images.device) < 0.5, columns.flip(1), columns)
    index = torch.arange(n, device=images.device).view(n, 1, 1)
    cut = padded.permute(0, 2, 3, 1)[index, rows.unsqueeze(2), columns.unsqueeze(1)]
    return cut.permute(0, 3, 1, 2)


def main() -> None:
    parser = make_parser(__doc__, decays=(3e-3, 5e-4, 0.2))
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--lr", type=float, default=0.4, help="the largest rate of the one-cycle schedule")
    parser.add_argument("--decay", type=float, default=5e-4, help="weight decay")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--limit", type=int, help="use only so many images")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, y, x_test, y_test = (values[: args.limit].to(device) for values in apical.data.load("cifar10"))
    torch.manual_seed(args.seed)
    head = {"head": "fc"} if args.rule == "readout" else {}
    learner = apical.make(args.rule, ResNet18(args.width), **head).to(device, memory_format=torch.channels_last)
    torch.manual_seed(args.seed)  # all rules see the same batches
    groups = learner.param_groups(args.lr, weight_decay=args.decay)
    optim = torch.optim.SGD(groups, momentum=0.9, nesterov=True, fused=device == "cuda")
    steps = args.epochs * (len(x) // args.batch)
    if steps < MIN_STEPS:
        parser.error(
            f"{len(x)} images in batches of {args.batch} give {steps} steps, and the schedule needs {MIN_STEPS}."
        )
    schedules = [torch.optim.lr_scheduler.OneCycleLR(optim, [g["lr"] for g in groups], steps, pct_start=0.25)]
    if args.rule == "dll:kolen-pollack":
        schedules.append(
            apical.DecayScheduler(optim, [(0, args.early_decay), (args.early_share, args.late_decay)], steps)
        )
    forward = torch.compile(learner) if args.compile else learner
    print_row(describe_run(args), args.out)
    for epoch in range(1, args.epochs + 1):
        learner.train()
        for index in torch.randperm(len(x), device=device).split(args.batch)[: len(x) // args.batch]:
            batch = augment(x[index]).contiguous(memory_format=torch.channels_last)
            with torch.autocast(device, torch.bfloat16):
                loss = F.cross_entropy(forward(batch), y[index])
            optim.zero_grad()
            loss.backward()
            optim.step()
            for schedule in schedules:
                schedule.step()
        learner.eval()
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            right = torch.cat([learner(part).argmax(1) for part in x_test.split(2000)]) == y_test
        row = {"epoch": epoch, "loss": loss.item(), "accuracy": 100 * right.float().mean().item()}
        row |= {"alignment": measure_alignment(learner), "gradient_norm": compute_gradient_norm(learner.model).item()}
        print_row(row, args.out)


if __name__ == "__main__":
    main()
