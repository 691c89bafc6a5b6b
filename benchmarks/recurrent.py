"""What one training step of a recurrent network costs, as ratios to autograd's step through `torch.nn.RNN`.

    python benchmarks/recurrent.py [--units 324] [--symbols 65] [--time 32] [--batch 64] [--rounds 50] [--threads 2]

Both sides run eagerly with the same fused Adam on one-hot characters, forwards, backwards and the optimiser's step.
Steps of all rules are interleaved, one of each in every round; each time is the median over the rounds.
"""

import argparse

import torch
import torch.nn.functional as F
from step import Step, measure, show
from torch import Tensor, nn

import apical
from apical.core.recurrent import Elman

RULES = [name for name in apical.rule_names() if apical.RULES[name.split(":")[0]].RECURRENT]


def autograd_step(model: Elman, x: Tensor, y: Tensor) -> Step:
    optim = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optim.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optim.step()

    return step


def rule_step(rule: str, model: Elman, x: Tensor, y: Tensor) -> Step:
    learner = apical.make(rule, model)
    optim = torch.optim.Adam(learner.param_groups(lr=1e-4), fused=True)
    return lambda: learner.step(x, y, optim)


def multiply_adds(symbols: int, units: int) -> dict[str, float]:
    """Of one moment: up, a product per layer for W, down through W_h and W_y; and for `dll` Θ's own two."""
    up, above = units * (2 * symbols + units), units * (symbols + units)
    return {"bp": 2 * up + above, "dll": 2 * up + 2 * above}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=324)
    parser.add_argument("--symbols", type=int, default=65)
    parser.add_argument("--time", type=int, default=32)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rule", action="append", help="only this rule; repeat for several")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    indices, y = torch.randint(0, chosen.symbols, (2, chosen.batch, chosen.time))
    x = F.one_hot(indices, chosen.symbols).float()

    def build() -> Elman:
        rnn = nn.RNN(chosen.symbols, chosen.units, batch_first=True)
        return Elman(rnn, nn.Linear(chosen.units, chosen.symbols))

    steps = {"autograd": autograd_step(build(), x, y)}
    steps |= {rule: rule_step(rule, build(), x, y) for rule in chosen.rule or RULES}
    times, peaks = measure(steps, chosen.rounds)
    fewest = multiply_adds(chosen.symbols, chosen.units)
    print(
        f"{chosen.units} units, {chosen.symbols} symbols, {chosen.time} time steps, batch {chosen.batch}, fused Adam, "
        f"torch {torch.__version__}, {chosen.threads} threads, median of {chosen.rounds} interleaved rounds"
    )
    show(times, peaks, fewest)


if __name__ == "__main__":
    main()
