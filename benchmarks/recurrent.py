"""What one training step of a recurrent network costs, as ratios to autograd's step through `torch.nn.RNN`.

    python benchmarks/recurrent.py [--units 324] [--symbols 65] [--time 32] [--batch 64] [--rounds 50] [--threads 2]

Both sides run eagerly with the same fused Adam on one-hot characters, forwards, backwards and the optimiser's step.
Steps of all rules are interleaved, one of each in every round; each time is the median over the rounds.
"""

import torch
import torch.nn.functional as F
from step import describe_run, make_parser, make_steps, measure_steps, print_table
from torch import nn

import apical

RULES = [name for name in apical.rule_names() if apical.RULES[name.split(":")[0]].RECURRENT]


def main() -> None:
    parser = make_parser(__doc__, batch=64, rounds=50)
    parser.add_argument("--units", type=int, default=324)
    parser.add_argument("--symbols", type=int, default=65)
    parser.add_argument("--time", type=int, default=32)
    arguments = parser.parse_args()
    units, symbols = arguments.units, arguments.symbols
    torch.set_num_threads(arguments.threads)
    indices, y = torch.randint(0, symbols, (2, arguments.batch, arguments.time))
    x = F.one_hot(indices, symbols).float()

    def build() -> apical.Elman:
        return apical.Elman(nn.RNN(symbols, units, batch_first=True), nn.Linear(units, symbols))

    times, peaks = measure_steps(make_steps(arguments.rule or RULES, build, x, y), arguments.rounds)
    print(f"{units} units, {symbols} symbols, {arguments.time} time steps, {describe_run(arguments)}")
    # The input's weights, W_h and W_y carry activity up; only W_h and W_y bring errors down.
    print_table(times, peaks, up=units * (2 * symbols + units), above=units * (symbols + units))


if __name__ == "__main__":
    main()
