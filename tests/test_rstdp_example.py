"""The example of STDP and reward-modulated STDP on MNIST: each part against a case worked out by hand."""

import importlib.util
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pages import ROOT

SPEC = importlib.util.spec_from_file_location("rstdp_mnist", ROOT / "examples" / "rstdp_mnist.py")
assert SPEC is not None
assert SPEC.loader is not None
example = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(example)

SMALL = example.Layer(inputs=2, filters=20, size=3, threshold=2.0, winners=2, radius=1, window=2)


def make_weights(filters: int, fan_in: int, seed: int = 0) -> Tensor:
    """Return weights that are whole multiples of 1/64, so that sums of them are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(13, 52, (filters, fan_in), generator=generator) / 64


def make_spikes(*shape: int, silent: float = 0.5, seed: int = 0) -> Tensor:
    """Return random spikes; this share of the neurons stays silent."""
    generator = torch.Generator().manual_seed(seed)
    ahead = torch.randint(1, example.STEPS + 1, shape, generator=generator)
    return (ahead * (torch.rand(shape, generator=generator) >= silent)).byte()


# The input.


def test_a_centre_cell_is_blind_to_uniform_light_and_its_opposite_has_the_opposite_sign_in_the_middle() -> None:
    for size in (3, 7, 13):
        on, off = example.make_dog(size, size / 9, 2 * size / 9), example.make_dog(size, 2 * size / 9, size / 9)
        for dog in (on, off):
            assert dog.sum().item() == pytest.approx(0.0, abs=1e-12)
            assert dog.max().item() == 1.0
            torch.testing.assert_close(dog, dog.flip(0))
            torch.testing.assert_close(dog, dog.T)
        assert on[size // 2, size // 2] == 1.0
        torch.testing.assert_close(off, -on / (-on).max())  # the difference of the same Gaussians, the other way round


def test_a_bright_dot_excites_on_cells_in_its_middle_and_uniform_grey_nobody() -> None:
    dot, grey = torch.zeros(1, 28, 28), torch.full((1, 41, 41), 200.0)
    dot[0, 14, 14] = 255
    on = example.filter_contrast(dot)[0, ::2, 14, 14]
    torch.testing.assert_close(on, torch.full((3,), 255.0).double())  # the largest value of a filter is 1
    assert example.filter_contrast(dot)[0, 1::2, 14, 14].eq(0).all()
    assert example.filter_contrast(grey)[0, :, 6:-6, 6:-6].eq(0).all()


def test_contrast_below_50_is_cut() -> None:
    dot = torch.zeros(2, 28, 28)
    dot[:, 14, 14] = torch.tensor([49.0, 51.0])
    assert example.filter_contrast(dot)[:, 0, 14, 14].tolist() == [0.0, pytest.approx(51.0)]


def test_local_normalisation_divides_by_the_mean_of_the_window() -> None:
    x = torch.zeros(1, 1, 5, 5)
    x[0, 0, 2, 2], x[0, 0, 2, 3] = 6.0, 3.0
    y = example.normalize_locally(x, radius=1)
    assert y[0, 0, 2, 2].item() == pytest.approx(6.0)  # the mean of 9 values with the sum 9 is 1
    assert y[0, 0, 2, 3].item() == pytest.approx(3.0)
    torch.testing.assert_close(example.normalize_locally(7 * x, radius=1), y)


def test_a_ramp_fires_from_its_top_equally_many_in_each_step() -> None:
    ramp = torch.arange(31.0).unsqueeze(0)  # 0 never fires; 30 values in 15 steps: two in each
    ahead = example.encode_latency(ramp)
    assert ahead.dtype == torch.uint8
    assert ahead[0].tolist() == [0] + [step for step in range(1, 16) for _ in range(2)]
    torch.testing.assert_close(example.encode_latency(5 * ramp.flip(1)), ahead.flip(1))


def test_what_is_left_over_after_fifteen_equal_steps_stays_silent() -> None:
    ahead = example.encode_latency(torch.arange(1.0, 35.0).unsqueeze(0))[0]  # 34 values: 2 in each step, 4 left over
    assert ahead[:4].eq(0).all()
    assert ahead.bincount().tolist() == [4] + [2] * 15


def test_fewer_values_than_steps_fire_one_by_one() -> None:
    assert example.encode_latency(torch.tensor([[0.0, 3.0, 9.0, 0.0]]))[0].tolist() == [0, 14, 15, 0]


# Neurons.


def test_a_neuron_fires_when_its_potential_is_above_the_threshold() -> None:
    patches = torch.tensor([[15.0, 10.0, 10.0, 1.0, 0.0]])  # the first, the sixth (twice), the last step, never
    weights = torch.tensor([[0.5, 0.25, 0.25, 1.0, 1.0]])
    potentials = example.integrate(patches, weights)
    assert potentials.squeeze().tolist() == [0.5] * 5 + [1.0] * 9 + [2.0]
    for threshold, ahead in ((0.25, 15), (0.5, 10), (0.9, 10), (1.0, 1), (2.0, 0), (math.inf, 0)):
        assert example.fire(potentials, threshold).item() == ahead


def test_keys_rank_by_time_first_and_by_potential_second() -> None:
    potentials = torch.zeros(15, 1, 4)
    potentials[3:, 0, 0] = 2.0
    potentials[3:, 0, 1] = 2.5
    potentials[4:, 0, 2] = 9.0  # one step later, with as much as nine inputs can give
    keys = example.rank_spikes(potentials, 1.0, fan_in=9)
    assert keys.argsort(descending=True).tolist() == [[1, 0, 2, 3]]
    assert keys[0].tolist() == [12 * 9 + 2.0, 12 * 9 + 2.5, 11 * 9 + 9.0, 0.0]


def test_pooling_takes_the_earliest_spike() -> None:
    ahead = torch.tensor([[[[3, 9, 0, 0], [0, 15, 0, 0], [0, 0, 0, 1], [0, 0, 2, 0]]]], dtype=torch.uint8)
    layer = example.Layer(1, 1, 1, 0.5, 1, 0, 2)  # 1 × 1 with weight 1: each neuron fires with its input
    assert example.compute_spikes(ahead, torch.ones(1, 1), layer).tolist() == [[[[15, 0], [0, 2]]]]


def test_patches_are_what_a_convolution_sees() -> None:
    ahead, weights = make_spikes(3, 2, 6, 5), make_weights(4, 18)
    fired = (ahead > 0).float()
    expected = torch.nn.functional.conv2d(fired, weights.view(4, 2, 3, 3), padding=1)
    got = example.integrate(example.cut_patches(ahead, 3), weights)[:, -1]  # in the last step all have fired
    assert got.mT.unflatten(-1, (6, 5)).equal(expected)


def test_spikes_of_all_images_equal_those_computed_image_by_image() -> None:
    ahead, weights = make_spikes(23, 2, 8, 8), make_weights(20, 18)
    together = example.compute_spikes(ahead, weights, SMALL)
    assert together.dtype == torch.uint8
    assert together.shape == (23, 20, 4, 4)
    assert together.equal(torch.cat([example.compute_spikes(image, weights, SMALL) for image in ahead.split(1)]))
    assert 0 < (together > 0).float().mean() < 1


def test_the_largest_potential_decides_and_silence_is_no_decision() -> None:
    layer = example.Layer(1, 20, 1, math.inf, 1, 0, 1)
    weights = torch.full((20, 1), 0.5)
    weights[13] = 0.6  # two filters for each digit
    ahead = torch.tensor([0, 3]).byte().view(2, 1, 1, 1)
    assert example.decide(ahead, weights, layer).tolist() == [-1, 6]


# Winners and learning.


def test_neighbours_are_in_a_square() -> None:
    near = example.find_neighbours(3, 4, 1)
    assert near[5].nonzero().flatten().tolist() == [0, 1, 2, 4, 5, 6, 8, 9, 10]
    assert near[0].nonzero().flatten().tolist() == [0, 1, 4, 5]
    assert example.find_neighbours(2, 3, 0).equal(torch.eye(6, dtype=torch.bool))


def test_winners_silence_their_filter_and_their_neighbourhood() -> None:
    keys = torch.zeros(6, 4)  # a row of six places, four filters
    keys[0, 0], keys[0, 1] = 9.0, 8.0  # filter 0 wins at place 0; filter 1 loses there
    keys[1, 2] = 7.0  # too near to place 0
    keys[2, 0] = 6.0  # its filter has won
    keys[3, 1] = 5.0  # the second winner
    keys[5, 2] = 4.0  # the third
    units, places, best = example.pick_winners(keys, example.find_neighbours(1, 6, 1), 5)
    assert units[:3].tolist() == [0, 1, 2]
    assert places[:3].tolist() == [0, 3, 5]
    assert best.tolist() == [9.0, 5.0, 4.0, 0.0, 0.0]


def test_soft_stdp_of_one_weight() -> None:
    weights = torch.tensor([[0.5, 0.8, 0.0], [0.5, 0.8, 1.0]])
    example.apply_stdp(weights, torch.tensor([1]), torch.tensor([[0.1, -0.1, 0.1]]), 0.0, 1.0, soft=True)
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.8, 0.0], [0.525, 0.784, 1.0]]))


@pytest.mark.parametrize(("soft", "low", "high"), [(True, 0.0, 1.0), (False, 0.2, 0.8)])
def test_weights_stay_within_their_bounds(soft: bool, low: float, high: float) -> None:
    weights = make_weights(3, 50).clamp(low, high)
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        rates = torch.rand(2, 50, generator=generator) * 0.4 - 0.2
        example.apply_stdp(weights, torch.tensor([2, 0]), rates, low, high, soft)
        assert low <= weights.min()
        assert weights.max() <= high


def test_stdp_strengthens_what_fired_before_or_with_the_winner_alone() -> None:
    layer = example.Layer(1, 2, 1, 0.7, 1, 0, 1)
    weights = torch.tensor([[0.75], [0.5]])  # filter 1 never reaches the threshold
    ahead = torch.tensor([0, 4]).byte().view(1, 1, 1, 2)
    learn = partial(example.learn_by_stdp, layer=layer, near=example.find_neighbours(1, 2, 0))
    assert learn(weights, ahead, torch.tensor([0.1, -0.1])).tolist() == [1]
    torch.testing.assert_close(weights, torch.tensor([[0.75 + 0.1 * 0.75 * 0.25], [0.5]]))


def follow_stdp(weights: Tensor, ahead: Tensor, up: float, down: float, layer: example.Layer) -> Tensor:
    """Return the weights after STDP that follows single neurons, step by step: a second simulation."""
    w = weights.view(-1, layer.inputs, layer.size, layer.size).clone()
    _, _, height, width = ahead.shape
    margin = layer.size // 2
    for image in torch.nn.functional.pad(ahead.long(), [margin] * 4):
        first = {}
        for row in range(height):
            for column in range(width):
                field = image[:, row : row + layer.size, column : column + layer.size]
                for t in range(example.STEPS):
                    potential = (w * (field >= example.STEPS - t)).sum((1, 2, 3))
                    if potential.max() > layer.threshold:  # the first at this place, with the largest potential
                        first[row, column] = (t, -potential.max().item(), potential.argmax().item(), field)
                        break
        for _ in range(layer.winners):
            if not first:
                break
            (row, column), (t, _, unit, field) = min(first.items(), key=lambda item: item[1][:2])
            rate = torch.where(field >= example.STEPS - t, up, down)
            w[unit] += rate * w[unit] * (1 - w[unit])
            first = {
                place: entry
                for place, entry in first.items()
                if entry[2] != unit and max(abs(place[0] - row), abs(place[1] - column)) > layer.radius
            }
    return w.flatten(1)


def test_stdp_equals_a_simulation_that_follows_single_neurons() -> None:
    layer = example.Layer(2, 6, 3, 3.0, 3, 1, 1)
    ahead, weights = make_spikes(8, 2, 5, 6, silent=0.6), make_weights(6, 18)
    expected = follow_stdp(weights, ahead, 0.1, -0.075, layer)
    learn = partial(example.learn_by_stdp, layer=layer, near=example.find_neighbours(5, 6, 1))
    learnt = learn(weights, ahead, torch.tensor([0.1, -0.075]))
    torch.testing.assert_close(weights, expected)
    assert learnt.min() > 0
    assert learnt.max() == 3


def follow_reward(
    weights: Tensor, ahead: Tensor, labels: Tensor, rates: Tensor, layer: example.Layer, soft: bool
) -> tuple[Tensor, list[bool]]:
    """Return the weights after R-STDP by plain convolutions, one image at a time, and which decisions were right."""
    w, right = weights.view(-1, layer.inputs, layer.size, layer.size).clone(), []
    for image, label in zip(ahead, labels.tolist(), strict=True):
        fired = torch.nn.functional.pad((image > 0).float(), [layer.size // 2] * 4)
        potential = torch.nn.functional.conv2d(fired.unsqueeze(0), w)[0]
        unit, row, column = np.unravel_index(potential.argmax().item(), potential.shape)
        right.append(bool(potential.max() > 0) and unit // (layer.filters // 10) == label)
        if potential.max() > 0:
            field = fired[:, row : row + layer.size, column : column + layer.size] > 0
            a_fired, a_silent = rates[0 if right[-1] else 1]
            change = torch.where(field, a_fired, a_silent)
            w[unit] += change * w[unit] * (1 - w[unit]) if soft else change
            w[unit] = w[unit].clamp(*((0.0, 1.0) if soft else (0.2, 0.8)))
    return w.flatten(1), right


@pytest.mark.parametrize("soft", [False, True])
def test_a_block_of_reward_learning_equals_one_image_at_a_time(soft: bool) -> None:
    ahead, labels = make_spikes(40, 2, 4, 4), torch.arange(40).byte() % 10
    ahead[7] = 0  # nobody fires: no decision, and nothing is learnt
    weights = make_weights(20, 18)
    rates = torch.tensor([[0.125, -0.0625], [-0.125, 0.03125]])
    expected, right = follow_reward(weights, ahead, labels, rates, SMALL, soft)
    learn = example.BlockLearner(partial(example.learn_by_reward, layer=SMALL, soft=soft), weights)
    got = [learn(part, digits, rates) for part, digits in zip(ahead.split(16), labels.split(16), strict=True)]
    torch.testing.assert_close(weights, expected)
    assert torch.cat(got).tolist() == right
    assert 0 < sum(right) < 39
    assert not right[7]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("kind", ["stdp", "reward", "soft"])
def test_replayed_blocks_equal_plain_calls(kind: str) -> None:
    count = 3 * example.BLOCK
    ahead, labels = make_spikes(count, 2, 4, 4).cuda(), (torch.arange(count).byte() % 10).cuda()
    if kind == "stdp":
        learn = partial(example.learn_by_stdp, layer=SMALL, near=example.find_neighbours(4, 4, 1).cuda())
        inputs, rates = (ahead,), torch.tensor([0.125, -0.09375]).cuda()
    else:
        learn = partial(example.learn_by_reward, layer=SMALL, soft=kind == "soft")
        inputs, rates = (ahead, labels), torch.tensor([[0.125, -0.0625], [-0.125, 0.03125]]).cuda()
    plain, replayed = make_weights(20, 18).cuda(), make_weights(20, 18).cuda()
    block = example.BlockLearner(learn, replayed)
    for parts in zip(*(values.split(example.BLOCK) for values in inputs), strict=True):
        expected = learn(plain, *parts, rates)
        assert block(*parts, rates).equal(expected)
        torch.testing.assert_close(replayed, plain)
        rates = rates / 2


@pytest.mark.parametrize(("label", "sign"), [(3, 1.0), (4, -1.0)])
def test_reward_strengthens_the_inputs_that_fired_and_punishment_weakens_them(label: int, sign: float) -> None:
    layer = example.Layer(2, 10, 1, math.inf, 1, 0, 1)
    weights = torch.full((10, 2), 0.5)
    weights[3, 0] = 0.6  # this filter decides
    before = weights.clone()
    ahead = torch.tensor([[5, 0]]).byte().view(1, 2, 1, 1)
    rates = torch.tensor(example.REWARD_RATES)
    right = example.learn_by_reward(weights, ahead, torch.tensor([label]), rates, layer=layer)
    assert right.tolist() == [label == 3]
    assert (weights - before)[3].sign().tolist() == [sign, -sign]
    assert (weights - before)[[0, 1, 2, 4, 5, 6, 7, 8, 9]].eq(0).all()


def test_rates_follow_the_shares_of_wrong_and_right_decisions() -> None:
    layer = example.Layer(1, 10, 1, math.inf, 1, 0, 1)
    weights = torch.full((10, 1), 0.5)
    weights[3] = 0.79  # it decides always, since the rates are small
    ahead, labels = torch.ones(20, 1, 1, 1).byte(), torch.tensor([3] * 15 + [1] * 5)
    full = torch.tensor(example.REWARD_RATES)
    learn = example.BlockLearner(partial(example.learn_by_reward, layer=layer), weights)
    right, rates = example.train_by_reward(learn, ahead, labels, full)
    assert right.tolist() == [True] * 15 + [False] * 5
    torch.testing.assert_close(rates, torch.stack([0.25 * full[0], 0.75 * full[1]]))


def test_the_rates_of_stdp_double_after_every_500_images(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, float, float]] = []

    def note(weights: Tensor, ahead: Tensor, rates: Tensor, **_: object) -> Tensor:
        seen.append((len(ahead), *rates.tolist()))
        return weights

    monkeypatch.setattr(example, "learn_by_stdp", note)
    example.train_by_stdp(make_weights(20, 18), make_spikes(250, 2, 2, 2), SMALL, 3260)
    assert sum(count for count, *_ in seen) == 3260
    rates = [up for count, up, _ in seen for _ in range(count)]
    for image in range(3260):
        assert rates[image] == pytest.approx(min(0.15, 0.004 * 2 ** (image // 500)))
    assert all(down == pytest.approx(-0.75 * up) for _, up, down in seen)


def test_a_readout_by_gradients_learns_from_which_neurons_fired_and_not_from_when() -> None:
    labels = torch.arange(200) % 10
    ahead = torch.zeros(200, 10, 2, 2, dtype=torch.uint8)
    ahead[torch.arange(200), labels, 1, 0] = torch.randint(1, 16, (200,)).byte()
    readout = example.train_readout(ahead, labels.byte(), 600, seed=3)
    assert torch.equal(readout((ahead > 0).flatten(1).float()).argmax(1), labels)
    again = example.train_readout((ahead > 0).byte(), labels.byte(), 600, seed=3)
    assert torch.equal(again.weight, readout.weight)


# The whole script.


def draw_strokes(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images of upright and lying strokes at random places, and which they are."""
    generator = np.random.default_rng(seed)
    images, labels = np.zeros((count, 28, 28), np.uint8), np.arange(count, dtype=np.uint8) % 2
    for image, label in zip(images, labels, strict=True):
        row, column = generator.integers(4, 10, 2)
        image[row : row + 14, column + 6 : column + 9] = 255
        if label:
            image[:] = image.T.copy()
    return images, labels


@pytest.fixture
def strokes(tmp_path: Path) -> Path:
    """Return a file of upright and lying strokes."""
    (x, y), (x_test, y_test) = draw_strokes(80, 0), draw_strokes(20, 1)
    np.savez(tmp_path / "strokes.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    return tmp_path / "strokes.npz"


def test_the_script_learns_goes_on_and_keeps_its_rows(
    strokes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = (example.Layer(6, 8, 5, 45.0, 3, 3, 2), example.Layer(8, 20, 3, 50.0, 3, 1, 3))
    monkeypatch.setattr(example, "LAYERS", (*small, example.Layer(20, 20, 5, math.inf, 1, 0, 1)))
    options = ["--data", str(strokes), "--first", "20", "--second", "20", "--device", "cpu", "--state"]

    def run(epochs: int, name: str, *more: str) -> list[dict[str, Any]]:
        out = tmp_path / f"{name}.jsonl"
        example.main([*options, str(tmp_path / f"{name}.pt"), "--epochs", str(epochs), "--out", str(out), *more])
        return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]

    whole = run(6, "whole")
    assert whole[0].keys() >= {"seed", "command", "torch", "device", "first", "second", "epochs"}
    assert [row["layer"] for row in whole[1:3]] == [1, 2]
    assert [row["epoch"] for row in whole[3:]] == [1, 2, 3, 4, 5, 6]
    assert whole[-1]["test_accuracy"] > 90  # chance is 50 for one who knows that there are two classes, else 10
    first = run(2, "parts")
    parts = run(6, "parts")
    assert parts[: len(first)] == first  # earlier rows stay
    scores = ("epoch", "train_accuracy", "test_accuracy")
    assert [[row[name] for name in scores] for row in parts if "epoch" in row] == [
        [row[name] for name in scores] for row in whole[3:]
    ]
    with pytest.raises(SystemExit, match="belongs to other settings"):
        example.main([*options, str(tmp_path / "whole.pt"), "--seed", "1"])
    control = run(0, "control", "--readout", "20")
    assert control[-1].keys() == {"readout", "test_accuracy", "seconds"}
    assert control[-1]["test_accuracy"] > 90
