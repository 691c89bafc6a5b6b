"""Local losses against autograd of each layer's own loss, written down a second time with torch alone."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import apical
from apical.errors import ApicalError
from cases import CASES, learner_for
from reference import assert_all_same, assert_same, autograd, credited, leaves
from strategies import Case, networks


def stages(model: nn.Sequential) -> list[nn.Sequential]:
    """What stands before the weights, then each layer with the modules that follow it, run out of place."""
    groups: list[list[nn.Module]] = [[nn.Identity()]]
    for module in leaves(model):
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
            groups.append([])
        if getattr(module, "inplace", False):
            module.inplace = False
        groups[-1].append(module)
    return [nn.Sequential(*group) for group in groups]


def cosines(v: Tensor) -> Tensor:
    """Similarities of all pairs of rows, each less its own mean; 1e-8 keeps silence from having a direction."""
    v = v - v.mean(1, keepdim=True)
    squares = v.pow(2).sum(1) + 1e-8
    return torch.einsum("ik,jk->ij", v, v) / (squares[:, None] * squares[None]).sqrt()


def seen_by_head(a: Tensor, conv: bool, features: int) -> Tensor:
    """The finest grid of equal sides (no finer than the activity) that keeps channels × cells within bounds."""
    if not conv or a.ndim == 2:
        return a.flatten(1)
    dims = a.ndim - 2
    side = max([s for s in range(1, 40) if a.shape[1] * s**dims <= features], default=1)
    grid = [min(side, n) for n in a.shape[2:]]
    pool = F.adaptive_avg_pool1d if dims == 1 else F.adaptive_avg_pool2d
    return pool(a, grid).flatten(1)


def expected(
    learner: apical.Learner, case: Case, loss: object = F.cross_entropy, s: float = 0.0, features: int = 1024
) -> dict[str, Tensor]:
    """Each layer's loss by autograd, with the layer's input detached."""
    names = {id(p): name for name, p in learner.named_parameters()}
    prefix, *layers = stages(case.model)
    grads: dict[str, Tensor] = {}
    u = prefix(case.x)
    for i, layer in enumerate(layers):
        a = layer(u.detach())
        params = list(layer.parameters())
        if i == len(layers) - 1:
            value = loss(a, case.labels)
        else:
            params.append(learner.heads[str(i)])
            h = seen_by_head(a, not isinstance(layer[0], nn.Linear), features)
            value = (1 - s) * loss(h @ learner.heads[str(i)].T, case.labels)
            if s:
                hot = F.one_hot(case.labels, learner.heads[str(i)].shape[0]).to(a.dtype)
                value = value + s * (cosines(h) - cosines(hot)).square().mean()
        for p, g in zip(params, torch.autograd.grad(value, params), strict=True):
            grads[names[id(p)]] = g
        u = a
    return grads


@given(case=networks(), features=st.sampled_from([1024, 6, 1]))
def test_every_layer_descends_its_own_heads_loss_and_nothing_crosses_a_layer(case: Case, features: int) -> None:
    learner = learner_for("local", case, features=features)
    assert_all_same(credited(learner, case.x, case.labels), expected(learner, case, features=features))
    output = case.model(case.x)
    credit = learner.credit(case.x, case.labels)
    assert_same(credit.loss, F.cross_entropy(output, case.labels))
    assert_same(credit.output, output)


@pytest.mark.parametrize("similarity", [0.99, 0.3])
@pytest.mark.parametrize("name", ["mlp", "deep", "cnn", "positions"])
def test_similarity_matching_is_autograd_of_the_pairs_cosines(name: str, similarity: float) -> None:
    case = CASES[name].case(batch=7)
    learner = learner_for("local", case, similarity=similarity)
    assert_all_same(credited(learner, case.x, case.labels), expected(learner, case, s=similarity))


def half_squares(output: Tensor, y: Tensor) -> Tensor:
    return (output - F.one_hot(y, output.shape[1])).square().sum() / (2 * len(y))


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_heads_take_the_learners_own_loss(name: str) -> None:
    case = CASES[name].case()
    learner = learner_for("local", case, loss="mse")
    assert_all_same(credited(learner, case.x, case.labels), expected(learner, case, half_squares))
    learner = learner_for("local", case, label_smoothing=0.2)

    def smooth(output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output, y, label_smoothing=0.2)

    assert_all_same(credited(learner, case.x, case.labels), expected(learner, case, smooth))

    def mine(output: Tensor, y: Tensor) -> Tensor:
        return (output.sin().sum(1) - y).square()

    learner = learner_for("local", case, loss=mine)
    found = expected(learner, case, lambda output, y: mine(output, y).mean())
    assert_all_same(credited(learner, case.x, case.labels), found)


def test_values_as_targets_are_similar_as_they_are() -> None:
    """Targets that are values: with s near 1 the gradient is that of their own cosines."""
    case = CASES["mlp"].case(batch=6)
    y = torch.randn(6, 3, dtype=torch.float64)
    learner = learner_for("local", case, loss="mse", similarity=0.5)
    w, head = case.model[1].weight, learner.heads["0"]
    h = torch.tanh(F.linear(case.x.flatten(1), w, case.model[1].bias))
    loss = 0.5 * (h @ head.T - y).square().sum() / 12 + 0.5 * (cosines(h) - cosines(y)).square().mean()
    (wanted,) = torch.autograd.grad(loss, w)
    assert_same(credited(learner, case.x, y)["model.1.weight"], wanted)


def test_an_output_with_positions_is_what_a_head_gives_too() -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Tanh(), nn.Conv1d(4, 3, 2)).double()
    x, y = torch.randn(5, 2, 9, dtype=torch.float64), torch.randint(0, 3, (5, 6))
    learner = apical.make("local", model, input_shape=(2, 9))
    head = learner.heads["0"]
    assert head.shape == (18, 28)
    loss = F.cross_entropy((model[:2](x).flatten(1) @ head.T).view(5, 3, 6), y)
    wanted = torch.autograd.grad(loss, [model[0].weight, model[0].bias, head])
    grads = credited(learner, x, y)
    for name, value in zip(("model.0.weight", "model.0.bias", "heads.0"), wanted, strict=True):
        assert_same(grads[name], value)


def test_without_hidden_layers_local_is_bp() -> None:
    model = nn.Sequential(nn.Linear(4, 3)).double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    learner = apical.make("local", model)
    assert_all_same(credited(learner, x, y), autograd(model, F.cross_entropy(model(x), y)))


def test_the_layers_above_are_nothing_to_a_hidden_layer() -> None:
    case = CASES["cnn"].case()
    learner = learner_for("local", case)
    before = credited(learner, case.x, case.labels)
    with torch.no_grad():
        case.model[5].weight.normal_()
    after = credited(learner, case.x, case.labels)
    assert torch.equal(before["model.0.weight"], after["model.0.weight"])
    assert not torch.equal(before["model.5.weight"], after["model.5.weight"])


def test_a_frozen_head_still_teaches_its_layer_and_a_frozen_layer_its_head() -> None:
    case = CASES["mlp"].case()
    learner = learner_for("local", case)
    whole = credited(learner, case.x, case.labels)
    learner.heads["0"].requires_grad_(False)
    case.model[3].weight.requires_grad_(False)
    part = credited(learner, case.x, case.labels)
    assert_all_same(part, {n: g for n, g in whole.items() if n not in ("heads.0", "model.3.weight")})
    learner.requires_grad_(False)
    with pytest.raises(ApicalError, match="nothing is left to train"):
        learner.credit(case.x, case.labels)


def test_heads_start_at_a_size_that_keeps_scores_of_unit_activity_at_one() -> None:
    torch.manual_seed(0)
    learner = apical.make("local", nn.Sequential(nn.Linear(5, 400), nn.Tanh(), nn.Linear(400, 50)))
    head = learner.heads["0"].detach()
    assert head.shape == (50, 400)
    assert abs(float(head.std()) * 20 - 1) < 0.03


@pytest.mark.parametrize(
    ("features", "side"), [(1024, 5), (100, 5), (99, 4), (64, 4), (35, 2), (16, 2), (15, 1), (4, 1), (1, 1)]
)
def test_a_head_sees_the_finest_grid_of_at_most_so_many_values_but_every_channel(features: int, side: int) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(100, 3))
    learner = apical.make("local", model, input_shape=(1, 5, 5), features=features)
    assert learner.pool(learner.network.layers[0], torch.zeros(2, 4, 5, 5)).shape == (2, 4 * side * side)


@pytest.mark.parametrize("rule", ["local", "ff", "dfa"])
def test_images_of_another_size_than_the_rule_was_built_for_are_refused_in_a_sentence(rule: str) -> None:
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3)]
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.ReLU(), *pool)
    learner = apical.make(rule, model, input_shape=(2, 8, 8))
    with pytest.raises(ApicalError, match=r"built for .* pass the input_shape"):
        learner.credit(torch.rand(4, 2, 11, 11), torch.tensor([0, 1, 2, 0]))


def test_heads_form_a_group_of_their_own() -> None:
    groups = learner_for("local", CASES["mlp"].case()).param_groups(lr=0.1, weight_decay=0.2)
    assert [group["name"] for group in groups] == ["W", "bias", "heads"]
    assert {(group["lr"], group["weight_decay"]) for group in groups} == {(0.1, 0.2)}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"similarity": 1.0}, "similarity is 1.0, but must lie in"),
        ({"similarity": -0.1}, "similarity is -0.1"),
        ({"similarity": "much"}, "similarity is 'much'"),
        ({"features": 0}, "features is 0, but must be a whole number"),
        ({"features": 1.5}, "features is 1.5"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ApicalError, match=says):
        learner_for("local", CASES["mlp"].case(), **options)


def test_a_convolution_asks_for_the_input_shape() -> None:
    with pytest.raises(ApicalError, match="input_shape"):
        apical.make("local", nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)))


@pytest.mark.parametrize("similarity", [0.0, 0.5])
def test_one_value_per_example_is_an_output_too(similarity: float) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1), nn.Flatten(0)).double()
    learner = apical.make("local", model, loss="mse", similarity=similarity)
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    h, head = torch.tanh(model[0](x)), learner.heads["0"]
    loss = (1 - similarity) * 0.5 * ((h @ head.T)[:, 0] - y).square().mean()
    loss = loss + similarity * (cosines(h) - cosines(y[:, None])).square().mean()
    (wanted,) = torch.autograd.grad(loss, model[0].weight)
    assert_same(credited(learner, x, y)["model.0.weight"], wanted)


OWN = ["local:kolen-pollack", "local:random"]


@pytest.mark.parametrize("rule", OWN)
@given(case=networks())
def test_with_weights_beside_the_heads_that_equal_them_nothing_changes(rule: str, case: Case) -> None:
    learner = learner_for(rule, case)
    with torch.no_grad():
        for i, head in learner.heads.items():
            learner.returns[i].copy_(head)
    found = credited(learner, case.x, case.labels)
    returned = {name: found.pop(name) for name in list(found) if name.startswith("returns.")}
    assert_all_same(found, expected(learner, case))
    assert set(returned) == ({f"returns.{i}" for i in learner.heads} if "kolen" in rule else set())
    assert_all_same(
        {name.replace("returns", "heads"): g for name, g in returned.items()},
        {name: g for name, g in found.items() if name.replace("heads", "returns") in returned},
    )


@pytest.mark.parametrize("rule", OWN)
def test_the_errors_of_the_heads_come_back_through_the_weights_beside_them(rule: str) -> None:
    """Thrice the weights, thrice the error: what the head sends up is not what brings the error back."""
    case = CASES["mlp"].case()
    learner = learner_for(rule, case)
    plain = expected(learner, case)
    with torch.no_grad():
        for i, head in learner.heads.items():
            learner.returns[i].copy_(3 * head)
    found = credited(learner, case.x, case.labels)
    hidden = [name for layer in learner.network.layers[:-1] for name in (layer.weight, layer.bias) if name]
    assert_all_same({n: found[n] for n in hidden}, {n: 3 * plain[n] for n in hidden})
    heads = [f"heads.{i}" for i in learner.heads]
    assert_all_same({n: found[n] for n in heads}, {n: plain[n] for n in heads})


def test_kolen_pollack_brings_the_weights_beside_a_head_to_the_head() -> None:
    case, rate, decay = CASES["deep"].case(), 0.1, 0.5
    learner = learner_for("local:kolen-pollack", case, decay=decay)
    gaps = {i: (learner.returns[i] - head).detach() for i, head in learner.heads.items()}
    optim = torch.optim.SGD(learner.param_groups(lr=rate))
    for step in range(1, 6):
        learner.step(case.x, case.labels, optim)
        now = {i: (learner.returns[i] - head).detach() for i, head in learner.heads.items()}
        assert_all_same(now, {i: gap * (1 - rate * decay) ** step for i, gap in gaps.items()})
    assert [group["name"] for group in optim.param_groups if group["weight_decay"]] == ["heads", "returns"]


def test_random_weights_beside_the_heads_stay_and_frozen_heads_hold_theirs() -> None:
    case = CASES["mlp"].case()
    for rule, freeze in (("local:random", False), ("local:kolen-pollack", True)):
        learner = learner_for(rule, case)
        learner.heads.requires_grad_(not freeze)
        before = [p.clone() for p in learner.returns.values()]
        learner.step(case.x, case.labels, torch.optim.SGD(learner.param_groups(lr=0.1)))
        assert all(torch.equal(a, b) for a, b in zip(before, learner.returns.values(), strict=True))


@pytest.mark.parametrize(
    "options", [{"feedback": "transposed"}, {"decay": 0.1}, {"feedback": "kolen-pollack", "decay": -1.0}], ids=str
)
def test_bad_feedback_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ApicalError, match="feedback"):
        learner_for("local", CASES["mlp"].case(), **options)
