"""MNIST by STDP and reward-modulated STDP in a deep spiking network, as Mozafari et al. (2019) describe it.

    python examples/rstdp_mnist.py --epochs 100 --out rstdp.jsonl --state rstdp.pt

The network and its constants are those of "Bio-inspired digit recognition using reward-modulated spike-timing-dependent
plasticity in deep convolutional networks" (Pattern Recognition 94), which reports 97.2 %, and of its authors' program for
MNIST in SpykeTorch, with which a user reports 96.4 % after 680 epochs. Nothing is differentiated. Each neuron fires at
most once in 15 steps, so its spike is one number, `ahead` = 15 − t: the number of steps in which the spike counts. A
spike in the first step is 15, one in the last step is 1, and 0 means no spike.

    input      on- and off-centre cells at three scales: the image is convolved with differences of Gaussians, values
               below 50 become 0, the others are divided by the mean around them; of what remains, the largest fifteenth
               fires in the first step, the next fifteenth in the second, and so on
    neurons    integrate without a leak, V(t) = Σ w [t_pre ≤ t], and fire as soon as V(t) > threshold
    layers     30 filters 5 × 5 (threshold 15), earliest spike of 2 × 2; 250 filters 3 × 3 (threshold 10), earliest spike
               of 3 × 3; 200 filters 5 × 5 (no threshold), 20 for each digit: the largest V at the end decides

The first spikes learn (in the same step the larger V goes first). At each place one filter competes, each filter wins
once, and a winner silences its neighbourhood: 5 winners with radius 3 in the first layer, 8 with radius 1 in the second.

    STDP       Δw = a₊ w(1−w) if t_pre ≤ t_post, else a₋ w(1−w); the filters of layers 1 and 2 learn so, one layer after
               the other, from a₊ = 0.004 on, doubled after every 500 images up to 0.15; a₋ = −0.75 a₊
    R-STDP     the one deciding filter of layer 3 changes after each image. If its digit is right, Δw = 0.004 m for
               inputs that fired and −0.003 m for the silent; if it is wrong, Δw = −0.004 h and 0.0005 h. m and h are
               the shares of wrong and right decisions in the 1,000 images before (at first 1); w stays within 0.2 and 0.8

The layers below are fixed when a layer learns, so that their spikes are computed once for all images. Learning takes one
image after the other, in the order of the files. On a GPU 100 images at a time are one recorded CUDA graph.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

START = time.time()
STEPS = 15
BLOCK = 100  # images that are computed together, or learnt from in one CUDA graph
BATCH = 1000  # images after which the rates of R-STDP adapt
DIGITS = 10
REWARD_RATES = ((0.004, -0.003), (-0.004, 0.0005))  # right and wrong decisions; inputs that fired and silent ones


class Layer(NamedTuple):
    """A layer of filters: what it sees, when it fires, who wins, and the window of the pooling after it."""

    inputs: int
    filters: int
    size: int
    threshold: float
    winners: int
    radius: int
    window: int


LAYERS = (Layer(6, 30, 5, 15.0, 5, 3, 2), Layer(30, 250, 3, 10.0, 8, 1, 3), Layer(250, 200, 5, math.inf, 1, 0, 1))


def make_dog(size: int, inner: float, outer: float) -> Tensor:
    """Return a difference of two Gaussians (size, size), with mean 0 and largest value 1."""
    x = torch.arange(size, dtype=torch.float64) - size // 2
    r2 = x.square() + x.square().unsqueeze(1)
    dog = torch.exp(-r2 / (2 * inner**2)) / inner**2 - torch.exp(-r2 / (2 * outer**2)) / outer**2
    dog = dog - dog.mean()
    return dog / dog.max()


def filter_contrast(images: Tensor) -> Tensor:
    """Return what on- and off-centre cells see: images (n, h, w) from 0 to 255 become (n, 6, h, w)."""
    scales = [(size, s, t) for size in (3, 7, 13) for s, t in ((size / 9, 2 * size / 9), (2 * size / 9, size / 9))]
    kernels = torch.stack([F.pad(make_dog(size, s, t), [(13 - size) // 2] * 4) for size, s, t in scales])
    contrast = F.conv2d(images.double().unsqueeze(1), kernels.unsqueeze(1).to(images.device), padding=6)
    return torch.where(contrast < 50, 0.0, contrast)


def normalize_locally(x: Tensor, radius: int = 8) -> Tensor:
    """Divide each value of (n, c, h, w) by the mean of its channel in the square around it."""
    return x / (F.avg_pool2d(x, 2 * radius + 1, 1, radius) + 1e-12)


def encode_latency(x: Tensor) -> Tensor:
    """Turn intensities (n, …) into spikes, uint8: the largest first, equally many in each step, zeros never."""
    flat = x.flatten(1)
    rank = flat.argsort(1, descending=True).argsort(1)
    crowd = ((flat > 0).sum(1, keepdim=True) // STEPS).clamp_min(1)  # spikes in one step
    return ((STEPS - rank // crowd).clamp_min(0) * (flat > 0)).byte().view_as(x)


def encode_images(images: Tensor) -> Tensor:
    """Return the input spikes (n, 6, h, w) of images (n, h, w) from 0 to 255."""
    return torch.cat([encode_latency(normalize_locally(filter_contrast(part))) for part in images.split(BLOCK)])


def cut_patches(ahead: Tensor, size: int) -> Tensor:
    """Return what each neuron of a layer sees: (n, c, h, w) becomes (n, h·w, c·size²), with silence beyond the edge."""
    padded = F.pad(ahead.float(), [size // 2] * 4)
    return padded.unfold(2, size, 1).unfold(3, size, 1).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


def integrate(patches: Tensor, weights: Tensor) -> Tensor:
    """Return the potentials (…, steps, places, filters) of patches (…, places, fan-in) and weights (filters, fan-in)."""
    left = torch.arange(STEPS, 0, -1, device=patches.device).view(-1, 1, 1)
    return (patches.unsqueeze(-3) >= left).to(weights.dtype) @ weights.mT


def fire(potentials: Tensor, threshold: float) -> Tensor:
    """Return the spikes (…, places, filters) of potentials (…, steps, places, filters), which never fall."""
    return (potentials > threshold).sum(-3)


def rank_spikes(potentials: Tensor, threshold: float, fan_in: int) -> Tensor:
    """Return keys (places, filters) that are larger for earlier spikes, then for larger potentials; 0 is no spike."""
    left = torch.arange(STEPS, 0, -1, device=potentials.device).view(-1, 1, 1)
    return ((fan_in * left + potentials) * (potentials > threshold)).amax(-3)  # no potential is larger than fan_in


def compute_spikes(ahead: Tensor, weights: Tensor, layer: Layer) -> Tensor:
    """Return a layer's spikes after pooling, uint8 (n, filters, …), for all its input spikes (n, c, h, w)."""
    size = [n // layer.window for n in ahead.shape[-2:]]
    pooled = torch.empty(len(ahead), layer.filters, *size, dtype=torch.uint8, device=ahead.device)
    for part, out in zip(ahead.split(BLOCK // 10), pooled.split(BLOCK // 10), strict=True):
        spikes = fire(integrate(cut_patches(part, layer.size), weights), layer.threshold)
        spikes = spikes.mT.unflatten(-1, part.shape[-2:]).float()
        out.copy_(F.max_pool2d(spikes, layer.window))  # the maximum is the earliest spike
    return pooled


def decide(ahead: Tensor, weights: Tensor, layer: Layer) -> Tensor:
    """Return the digits (n,) that the last layer decides for; −1 for an image without spikes."""
    potential = cut_patches(ahead > 0, layer.size) @ weights.mT  # (n, places, filters)
    highest, unit = potential.amax(1).max(1)
    return torch.where(highest > 0, unit // (layer.filters // DIGITS), -1)


def find_neighbours(height: int, width: int, radius: int) -> Tensor:
    """Return whether two places of a map are within a square of this radius: (places, places)."""
    place = torch.cartesian_prod(torch.arange(height), torch.arange(width))
    return (place - place.unsqueeze(1)).abs().amax(2) <= radius


def pick_winners(keys: Tensor, near: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the filters, places and keys (count,) of those who may learn; the key is 0 if nobody is left.

    At each place the filter with the best of keys (places, filters) competes. A winner silences its filter, and all near it.
    """
    best, units = keys.max(1)
    winners = []
    for _ in range(count):
        key, place = best.max(0, keepdim=True)
        unit = units.index_select(0, place)
        winners.append((unit, place, key))
        best = best.masked_fill(near.index_select(0, place).squeeze(0) | (units == unit), 0.0)
    unit, place, key = (torch.cat(parts) for parts in zip(*winners, strict=True))
    return unit, place, key


def apply_stdp(weights: Tensor, units: Tensor, rates: Tensor, low: float, high: float, soft: bool) -> None:
    """Add the rates (k, fan-in) to these filters' weights, in place; if soft, times (w − low)(high − w)."""
    if soft:
        w = weights.index_select(0, units)
        rates = rates * (w - low) * (high - w)
    weights.index_add_(0, units, rates).clamp_(low, high)


def learn_by_stdp(weights: Tensor, ahead: Tensor, rates: Tensor, *, layer: Layer, near: Tensor) -> Tensor:
    """Change weights by STDP with rates (a₊, a₋), image after image (n, c, h, w), and return how many filters learnt."""
    learners = []
    for patches in cut_patches(ahead, layer.size):
        potentials = integrate(patches, weights)
        keys = rank_spikes(potentials, layer.threshold, patches.shape[-1])
        units, places, keys = pick_winners(keys, near, layer.winners)
        before = patches[places] >= fire(potentials, layer.threshold)[places, units].unsqueeze(1)
        change = torch.where(before, rates[0], rates[1]) * (keys > 0).unsqueeze(1)
        apply_stdp(weights, units, change, 0.0, 1.0, soft=True)
        learners.append(keys > 0)
    return torch.stack(learners).sum(1)


def learn_by_reward(
    weights: Tensor, ahead: Tensor, labels: Tensor, rates: Tensor, *, layer: Layer, soft: bool = False
) -> Tensor:
    """Change the last layer's weights by R-STDP, image after image, and return which decisions were right (n,).

    `rates` is (2, 2): for right and wrong decisions, and for inputs that fired and silent ones. What does not depend on
    the weights is computed for all images at first, so that few operations are left for each.
    """
    patches = cut_patches(ahead > 0, layer.size)  # (n, places, fan-in) of 0 and 1
    awake = patches.amax((1, 2)) > 0  # nothing is learnt from an image without spikes
    rates = (rates * awake.view(-1, 1, 1)).view(-1, 2, 2, 1, 1)
    changes = torch.where(patches.unsqueeze(1) > 0, rates[:, :, 0], rates[:, :, 1]).flatten(
        1, 2
    )  # (n, 2·places, fan-in)
    digit = torch.arange(layer.filters, device=weights.device) // (layer.filters // DIGITS)
    wrong = digit != labels.unsqueeze(1)  # (n, filters)
    place = torch.arange(patches.shape[1], device=weights.device)
    rows = (wrong.unsqueeze(2) * len(place) + place).flatten(1)  # which change a neuron (filter, place) would bring
    units = []
    for i in range(len(patches)):
        winner = (weights @ patches[i].mT).flatten().argmax(0, keepdim=True)
        units.append(winner // len(place))
        change = changes[i].index_select(0, rows[i].index_select(0, winner))
        apply_stdp(weights, units[i], change, *((0.0, 1.0, True) if soft else (0.2, 0.8, False)))
    return ~wrong.gather(1, torch.stack(units)).squeeze(1) & awake


class BlockLearner:
    """Calls a function that changes weights. On a GPU it records the call for a whole block once, and then replays it.

    A result is valid until the next call.
    """

    def __init__(self, learn: Callable[..., Tensor], weights: Tensor) -> None:
        self.learn, self.weights = learn, weights
        self.replay: Callable[[], None] | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        if not self.weights.is_cuda or len(inputs[0]) != BLOCK:
            return self.learn(self.weights, *inputs)
        if self.replay is None:
            self.replay = self._record(inputs)
        for buffer, value in zip(self.buffers, inputs, strict=True):
            buffer.copy_(value)
        self.replay()
        return self.result

    def _record(self, inputs: tuple[Tensor, ...]) -> Callable[[], None]:
        """Record the function with inputs in buffers of its own, after one call that loads all it needs."""
        self.buffers, before = [value.clone() for value in inputs], self.weights.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.learn(self.weights, *self.buffers)
        torch.cuda.current_stream().wait_stream(stream)
        self.weights.copy_(before)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.result = self.learn(self.weights, *self.buffers)
        return graph.replay


def train_by_stdp(weights: Tensor, ahead: Tensor, layer: Layer, images: int) -> None:
    """Train a layer on so many images, over and over in the same order. The rates double after every 500."""
    near = find_neighbours(ahead.shape[2], ahead.shape[3], layer.radius).to(weights.device)
    learn = BlockLearner(partial(learn_by_stdp, layer=layer, near=near), weights)
    rates = torch.tensor([[rate, -0.75 * rate] for rate in (0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.15)])
    rates, seen = rates.to(weights.device), 0
    while seen < images:
        start = seen % len(ahead)
        block = ahead[start : start + min(BLOCK, images - seen)]
        learn(block, rates[min(seen // 500, len(rates) - 1)])
        seen += len(block)


def train_by_reward(learn: BlockLearner, ahead: Tensor, labels: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
    """Train the last layer for one epoch, and return which decisions were right, and the rates after the epoch."""
    full = torch.tensor(REWARD_RATES, device=rates.device)
    right = torch.zeros(len(labels), dtype=torch.bool, device=rates.device)
    for start in range(0, len(labels), BATCH):
        batch = slice(start, start + BATCH)
        blocks = zip(ahead[batch].split(BLOCK), labels[batch].split(BLOCK), right[batch].split(BLOCK), strict=True)
        for spikes, digits, out in blocks:
            out.copy_(learn(spikes, digits, rates))
        share = right[batch].float().mean()
        rates = full * torch.stack([1 - share, share]).unsqueeze(1)
    return right, rates


def train_readout(ahead: Tensor, labels: Tensor, epochs: int, seed: int) -> torch.nn.Linear:
    """Train a linear readout of which neurons fired, by gradients: the control for what layer 3 makes of its inputs."""
    torch.manual_seed(seed)
    fired = (ahead > 0).flatten(1)
    readout = torch.nn.Linear(fired.shape[1], DIGITS).to(ahead.device)
    optim = torch.optim.Adam(readout.parameters(), 1e-3)
    for _ in range(epochs):
        for places in torch.randperm(len(fired)).to(ahead.device).split(BLOCK):
            optim.zero_grad()
            F.cross_entropy(readout(fired[places].float()), labels[places].long()).backward()
            optim.step()
    return readout


def load_digits(path: Path | None, limit: int | None, device: str) -> list[Tensor]:
    """Return training images (n, h, w) from 0 to 255 and their labels (n,), and the same for the test."""
    if path is None:
        import apical

        x, y, x_test, y_test = apical.data.load("mnist")  # normalised
        low, scale = x.min(), 255 / (x.max() - x.min())
        x, x_test = (((part - low) * scale).round().squeeze(1) for part in (x, x_test))
        values = [x, y, x_test, y_test]
    else:
        with np.load(path) as arrays:
            values = [torch.from_numpy(arrays[name]) for name in ("x_train", "y_train", "x_test", "y_test")]
    return [value[:limit].byte().to(device) for value in values]


def score(hits: Tensor) -> float:
    """Return how many of these decisions are right, in percent."""
    return round(100 * hits.double().mean().item(), 3)


def print_row(row: dict[str, Any], out: Path | None) -> None:
    """Print a row as JSON with the seconds since the start, and append it to the file."""
    line = json.dumps({**row, "seconds": round(time.time() - START, 1)}, default=str)
    print(line, flush=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def save(state: dict[str, Any], path: Path | None) -> None:
    """Save the state of a run. A file from before stays whole until the new one is complete."""
    if path is not None:
        torch.save(state, path.with_name(path.name + ".part"))
        path.with_name(path.name + ".part").replace(path)


def restore(args: argparse.Namespace) -> dict[str, Any]:
    """Return the state that an earlier run with these settings has saved, or that of a new network."""
    settings = {name: str(getattr(args, name)) for name in ("first", "second", "soft", "images", "data", "seed")}
    if args.state is not None:
        args.state.parent.mkdir(parents=True, exist_ok=True)
    if args.state is not None and args.state.exists():
        state: dict[str, Any] = torch.load(args.state, map_location=args.device)
        if state["settings"] != settings:
            raise SystemExit(f"{args.state} belongs to other settings, {state['settings']}: give --state another name.")
        return state
    generator = torch.Generator().manual_seed(args.seed)
    shapes = [(layer.filters, layer.inputs * layer.size**2) for layer in LAYERS]
    weights = [torch.empty(shape).normal_(0.8, 0.05, generator=generator).clamp_(0.0, 1.0) for shape in shapes]
    start = {"weights": [w.to(args.device) for w in weights], "rates": torch.tensor(REWARD_RATES, device=args.device)}
    return {"settings": settings, "layers": 0, "epoch": 0, **start}


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=120_000, help="images that layer 1 learns from, again and again")
    parser.add_argument("--second", type=int, default=240_000, help="images that layer 2 learns from")
    parser.add_argument("--epochs", type=int, default=680, help="epochs of layer 3 (the authors' 680 need a GPU)")
    parser.add_argument(
        "--readout", type=int, default=0, help="epochs of a readout by gradients, a control for layer 3"
    )
    parser.add_argument("--soft", action="store_true", help="multiply R-STDP by w(1-w), and let w be from 0 to 1")
    parser.add_argument("--images", type=int, help="use only so many images of the training set, and of the test set")
    parser.add_argument("--data", type=Path, help="an .npz with x_train, y_train, x_test, y_test instead of MNIST")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights, the only random numbers")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="append the printed rows to this file")
    parser.add_argument("--state", type=Path, help="save the weights here after each epoch, and go on from there")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse_options(arguments)
    state = restore(args)
    device = torch.cuda.get_device_name(args.device) if args.device.startswith("cuda") else "CPU"
    machine = {"device": device, "torch": torch.__version__, "command": " ".join(["python", *sys.argv])}
    print_row({**vars(args), **machine}, args.out)
    x, y, x_test, y_test = load_digits(args.data, args.images, args.device)
    ahead, ahead_test = encode_images(x), encode_images(x_test)
    for i, images in enumerate((args.first, args.second)):
        layer, w = LAYERS[i], state["weights"][i]
        if state["layers"] == i:
            train_by_stdp(w, ahead, layer, images)
            state["layers"] = i + 1
            save(state, args.state)
            print_row({"layer": i + 1, "images": images, "mean w(1-w)": (w * (1 - w)).mean().item()}, args.out)
        ahead, ahead_test = (compute_spikes(spikes, w, layer) for spikes in (ahead, ahead_test))
    if args.readout:
        readout = train_readout(ahead, y, args.readout, args.seed)
        right = [readout((part > 0).flatten(1).float()).argmax(1) for part in ahead_test.split(5 * BLOCK)]
        print_row({"readout": args.readout, "test_accuracy": score(torch.cat(right) == y_test)}, args.out)
    layer, w = LAYERS[2], state["weights"][2]
    learn = BlockLearner(partial(learn_by_reward, layer=layer, soft=args.soft), w)
    for epoch in range(state["epoch"] + 1, args.epochs + 1):
        right, state["rates"] = train_by_reward(learn, ahead, y, state["rates"])
        state["epoch"] = epoch
        save(state, args.state)
        test = torch.cat([decide(part, w, layer) for part in ahead_test.split(5 * BLOCK)]) == y_test
        accuracies = {"train_accuracy": right, "test_accuracy": test}
        print_row({"epoch": epoch, **{name: score(hits) for name, hits in accuracies.items()}}, args.out)


if __name__ == "__main__":
    main()
