"""Forward-forward against autograd of each layer's goodness, written down a second time with torch alone."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apical
from apical.errors import ApicalError, UnsupportedError
from cases import CASES, learner_for
from reference import assert_all_same, assert_same, leaves
from strategies import Case

NAMES = ["mlp", "deep", "cnn", "positions"]


def stages(model: nn.Sequential) -> list[tuple[nn.Module | None, nn.Sequential]]:
    """Each layer of weights and what follows it, run out of place; None for what stands before the first."""
    groups: list[tuple[nn.Module | None, list[nn.Module]]] = [(None, [])]
    for module in leaves(model):
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
            groups.append((module, []))
            continue
        if getattr(module, "inplace", False):
            module.inplace = False
        groups[-1][1].append(module)
    return [(layer, nn.Sequential(*phi)) for layer, phi in groups]


def normalised(u: Tensor, layer: nn.Module) -> Tensor:
    """Mean square 1 over channels, or over features, at each position (and silence stays silent)."""
    dim = -1 if isinstance(layer, nn.Linear) else 1
    return u / (u.pow(2).mean(dim, keepdim=True) + 1e-6).sqrt()


def activities(learner: apical.Learner, x: Tensor, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(input, activity) of each hidden layer, inputs detached; `rows` are each example's weights on V's classes."""
    (_, prefix), *layers = stages(learner.model)
    u, found = prefix(x), []
    for i, (layer, phi) in enumerate(layers[:-1]):
        u = u.detach() if i == 0 else normalised(u.detach(), layer)
        a = phi(layer(u) + torch.einsum("nc,c...->n...", rows, learner.label[str(i)]))
        found.append((u, a))
        u = a
    return found


def mean_square(a: Tensor) -> Tensor:
    return a.pow(2).flatten(1).mean(1)


def hot(labels: Tensor, classes: int = 3) -> Tensor:
    return F.one_hot(labels, classes).double()


def ready(case: Case, **options: object) -> apical.Learner:
    """A learner whose label weights are not zero any more."""
    learner = learner_for("ff", case, **options)
    for v in learner.label.values():
        v.data.normal_(std=0.7)
    return learner


def credited(learner: apical.Learner, case: Case, wrong: Tensor) -> dict[str, Tensor]:
    """The gradients where noise makes these labels the wrong ones."""
    noise = {"negative": 0.1 + 0.8 * hot(wrong)}
    with torch.no_grad():
        update = learner.update(learner.params(), {}, case.x, case.labels, noise)
    return update.grads


def wrong_labels(y: Tensor) -> Tensor:
    return (y + 1 + torch.arange(len(y)) % 2) % 3


def expected(
    learner: apical.Learner, case: Case, kappa: float, theta: float | None = None, peer: float = 0.0
) -> dict[str, Tensor]:
    y, wrong = case.labels, wrong_labels(case.labels)
    names = {id(p): name for name, p in learner.named_parameters()}
    layers = stages(case.model)[1:]
    true, false = (activities(learner, case.x, hot(label)) for label in (y, wrong))
    grads: dict[str, Tensor] = {}
    for i, ((_, good), (_, bad)) in enumerate(zip(true, false, strict=True)):
        up, down = mean_square(good), mean_square(bad)
        if theta is None:
            loss = -F.logsigmoid(kappa * (up - down)).mean()
        else:
            loss = -(F.logsigmoid(kappa * (up - theta)) + F.logsigmoid(kappa * (theta - down))).mean()
        means = good.mean(0)
        loss = loss + kappa * peer * 0.5 * (means - means.mean()).pow(2).mean()
        params = [*layers[i][0].parameters(), learner.label[str(i)]]
        for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
            grads[names[id(p)]] = g
    last, phi = layers[-1]
    neutral = activities(learner, case.x, torch.full((len(y), 3), 1 / 3, dtype=torch.float64))[-1][1].detach()
    loss = F.cross_entropy(phi(last(normalised(neutral, last))), y)
    params = list(last.parameters())
    grads |= {names[id(p)]: g for p, g in zip(params, torch.autograd.grad(loss, params), strict=True)}
    return grads


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"sharpness": 3.0}, {"sharpness": 3.0, "peer": 0.5}])
def test_every_layer_descends_its_own_goodness_loss(name: str, options: dict[str, float]) -> None:
    case = CASES[name].case(batch=6)
    learner = ready(case, **options)
    found = credited(learner, case, wrong_labels(case.labels))
    kappa = options.get("sharpness", 100.0)
    assert_all_same(found, expected(learner, case, kappa, peer=options.get("peer", 0.0)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("peer", [0.0, 0.2])
def test_with_a_threshold_each_label_has_a_loss_of_its_own(name: str, peer: float) -> None:
    case = CASES[name].case(batch=6)
    learner = ready(case, threshold=0.3, sharpness=4.0, peer=peer)
    found = credited(learner, case, wrong_labels(case.labels))
    assert_all_same(found, expected(learner, case, 4.0, theta=0.3, peer=peer))


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_and_the_output_are_the_readouts(name: str) -> None:
    case = CASES[name].case(batch=6)
    learner = ready(case, predict="readout")
    credit = learner.credit(case.x, case.labels)
    last, phi = stages(case.model)[-1]
    top = activities(learner, case.x, torch.full((6, 3), 1 / 3, dtype=torch.float64))[-1][1]
    scores = phi(last(normalised(top, last)))
    assert_same(credit.output, scores)
    assert_same(credit.loss, F.cross_entropy(scores, case.labels))
    assert_same(learner(case.x), scores)


@pytest.mark.parametrize("name", NAMES)
def test_a_class_scores_the_goodness_that_its_label_brings_about(name: str) -> None:
    case = CASES[name].case(batch=6)
    learner = ready(case, sharpness=7.0)
    each = [sum(mean_square(a) for _, a in activities(learner, case.x, hot(torch.full((6,), c)))) for c in range(3)]
    assert_same(learner(case.x), 7 * torch.stack(each, 1))


@pytest.mark.parametrize("name", NAMES)
def test_goodness_does_not_leak_upwards(name: str) -> None:
    """A layer that is louder in every unit alike changes nothing above it."""
    case = CASES[name].case(batch=6)
    learner = ready(case, sharpness=1.0)
    (_, prefix), (first, phi), *above = stages(case.model)
    louder = nn.Sequential(phi, _Louder())
    model = nn.Sequential(prefix, first, louder, *(m for pair in above for m in pair))
    other = apical.make("ff", model, input_shape=case.input_shape, sharpness=1.0)
    for i, v in other.label.items():
        v.data.copy_(learner.label[i])
    wrong = wrong_labels(case.labels)
    one, two = ([*credited(each, case, wrong).items()] for each in (learner, other))
    changed = {n for (n, a), (_, b) in zip(one, two, strict=True) if float((a - b).norm() / a.norm()) > 1e-2}
    first_layer = learner.network.layers[0]
    assert changed == {"label.0", first_layer.weight, first_layer.bias} - {None}


class _Louder(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        return 3 * a


@pytest.mark.parametrize("negatives", ["uniform", "hard"])
def test_the_wrong_label_is_never_the_true_one(negatives: str) -> None:
    case = CASES["mlp"].case()
    learner = ready(case, negatives=negatives)
    y = torch.arange(3).repeat(2000)
    output = torch.tensor([[50.0, -50.0, 0.0]], dtype=torch.float64).expand(6000, 3)
    noise = learner.draw(torch.zeros(6000, 6, dtype=torch.float64), torch.Generator().manual_seed(0))
    noise["negative"][:3] = 0.0
    assert not bool((learner.draw_wrong_labels(y, output, noise["negative"]) == y).any())


def test_wrong_labels_are_uniform_or_as_likely_as_the_readout_finds_them() -> None:
    """Four other labels: between two alone, a draw by the largest and one by the smallest value would agree."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 5)).double()
    p = torch.tensor([0.5, 0.25, 0.12, 0.08, 0.05], dtype=torch.float64)
    y = torch.arange(5).repeat_interleave(20_000)
    x = torch.zeros(100_000, 6, dtype=torch.float64)
    for negatives in ("uniform", "hard"):
        learner = apical.make("ff", model, negatives=negatives)
        noise = learner.draw(x, torch.Generator().manual_seed(1))["negative"]
        wrong = learner.draw_wrong_labels(y, p.log().expand(100_000, 5), noise)
        shares = torch.stack([hot(wrong[y == c], 5).mean(0) for c in range(5)])
        wanted = (p if negatives == "hard" else torch.ones_like(p)) * (1 - torch.eye(5, dtype=torch.float64))
        wanted = wanted / wanted.sum(1, keepdim=True)
        assert float((shares - wanted).abs().max()) < 4 * math.sqrt(0.25 / 20_000)


def test_credit_draws_its_negatives_and_dropout_is_the_same_for_both_labels() -> None:
    """Without label weights both labels give one activity, so that nothing but V has a gradient."""
    case = CASES["conv1d with dropout"].case()
    learner = learner_for("ff", case)
    for v in learner.label.values():
        v.data.zero_()
    learner.credit(case.x, case.labels)
    for layer in learner.network.layers[:-1]:
        assert float(learner.get_parameter(layer.weight).grad.abs().max()) < 1e-12
    assert float(learner.label["0"].grad.abs().max()) > 0


def test_label_weights_have_a_row_per_class_in_the_shape_of_the_drive_and_their_own_group() -> None:
    learner = learner_for("ff", CASES["cnn"].case())
    assert [tuple(v.shape) for v in learner.label.values()] == [(3, 4, 5, 4), (3, 6, 4, 3)]
    groups = learner.param_groups(lr=0.1, weight_decay=0.2)
    assert [group["name"] for group in groups] == ["W", "bias", "label"]
    assert {(group["lr"], group["weight_decay"]) for group in groups} == {(0.1, 0.2)}


def test_label_weights_are_faint_at_first() -> None:
    torch.manual_seed(0)
    learner = apical.make("ff", nn.Sequential(nn.Linear(4, 5000), nn.ReLU(), nn.Linear(5000, 3)))
    assert learner.label["0"].std().item() == pytest.approx(0.01, rel=0.05)


def test_what_is_frozen_gets_no_gradient_and_nothing_left_is_refused() -> None:
    case = CASES["mlp"].case(batch=6)
    learner = ready(case)
    whole = credited(learner, case, wrong_labels(case.labels))
    frozen = {"label.1", "model.1.weight", "model.1.bias"}
    for name in frozen:
        learner.get_parameter(name).requires_grad_(False)
    part = credited(learner, case, wrong_labels(case.labels))
    assert_all_same(part, {n: g for n, g in whole.items() if n not in frozen})
    learner.requires_grad_(False)
    with pytest.raises(ApicalError, match="nothing is left to train"):
        learner.credit(case.x, case.labels)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"predict": "both"}, "predict is 'both', but must be one of goodness, readout"),
        ({"negatives": "easy"}, "negatives is 'easy'"),
        ({"threshold": 0.0}, "threshold is 0.0, but must be a positive number"),
        ({"sharpness": -1}, "sharpness is -1"),
        ({"peer": -0.1}, "peer is -0.1, but must not be negative"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ApicalError, match=says):
        learner_for("ff", CASES["mlp"].case(), **options)


def test_networks_and_targets_without_labels_or_hidden_layers_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="layer 0 is the only one"):
        apical.make("ff", nn.Sequential(nn.Linear(4, 3)))
    conv = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Tanh(), nn.Conv1d(4, 3, 2))
    with pytest.raises(UnsupportedError, match=r"layer 2 ends in an output of shape \(batch, 3, 6\)"):
        apical.make("ff", conv, input_shape=(2, 9))
    with pytest.raises(UnsupportedError, match="at least two classes"):
        apical.make("ff", nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)))
    case = CASES["mlp"].case()
    with pytest.raises(UnsupportedError, match="integers work"):
        learner_for("ff", case, loss="mse").credit(case.x, torch.randn(5, 3, dtype=torch.float64))
    with pytest.raises(ApicalError, match="input_shape"):
        apical.make("ff", nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)))
