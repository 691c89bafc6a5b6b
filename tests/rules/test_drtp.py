"""Direct random target projection against autograd of each layer's overlap with the projected target."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor, nn

import apical
from apical.errors import ApicalError
from cases import CASES, learner_for
from reference import assert_all_same, credited, gradients, leaves
from strategies import Case, networks


def expected(learner: apical.Learner, case: Case) -> dict[str, Tensor]:
    """∂/∂W of y* · B a, by autograd, with each layer's input detached; the last layer's of the loss."""
    modules = list(leaves(case.model))
    starts = [k for k, m in enumerate(modules) if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d)]
    for module in modules:
        if getattr(module, "inplace", False):
            module.inplace = False
    names = {id(p): name for name, p in learner.named_parameters()}
    u = nn.Sequential(*modules[: starts[0]])(case.x)
    grads = {}
    for i, (start, end) in enumerate(zip(starts, [*starts[1:], None], strict=True)):
        layer = nn.Sequential(*modules[start:end])
        a = layer(u.detach())
        if end is None:
            value = F.cross_entropy(a, case.labels)
        else:
            b = learner.projections[str(i)]
            target = F.one_hot(case.labels, b.shape[0]).to(a.dtype)
            value = (a.flatten(1) @ b.T * target).sum(1).mean()
        params = list(layer.parameters())
        grads |= {names[id(p)]: g for p, g in zip(params, torch.autograd.grad(value, params), strict=True)}
        u = a
    return grads


@given(case=networks())
def test_a_hidden_layer_learns_from_the_projected_target_alone(case: Case) -> None:
    learner = learner_for("drtp", case)
    assert_all_same(credited(learner, case.x, case.labels), expected(learner, case))


def test_floating_targets_are_projected_as_they_are() -> None:
    case = CASES["cnn"].case()
    learner = learner_for("drtp", case)
    hot = F.one_hot(case.labels, 3).double()
    assert_all_same(credited(learner, case.x, hot), credited(learner, case.x, case.labels))
    last = learner.network.layers[-1]
    doubled = learner_for("drtp", case, loss="mse")
    doubled.projections = learner.projections
    once, twice = credited(doubled, case.x, hot), credited(doubled, case.x, 2 * hot)
    hidden = [name for name in once if name not in (last.weight, last.bias)]
    assert_all_same({n: twice[n] for n in hidden}, {n: 2 * once[n] for n in hidden})


def test_the_projections_never_change_and_have_the_sources_spread() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 400), nn.Tanh(), nn.Linear(400, 50))
    learner = apical.make("drtp", model)
    b = learner.feedback_weights[1]
    assert learner.feedback_weights[0] is None
    assert float(b.std()) == pytest.approx((2 / 400) ** 0.5, rel=0.05)
    assert float(apical.make("drtp", model, std=0.3).feedback_weights[1].std()) == pytest.approx(0.3, rel=0.05)
    before = b.clone()
    learner.step(torch.randn(3, 5), torch.tensor([0, 1, 2]), torch.optim.SGD(learner.param_groups(lr=0.1)))
    assert torch.equal(before, learner.feedback_weights[1])
    assert "projections.0" not in {*gradients(learner), *learner.trainable}


def test_another_input_shape_than_it_was_built_for_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Conv2d(2, 2, 1), nn.Flatten())
    model.extend([nn.Linear(8, 3)])
    learner = apical.make("drtp", model, input_shape=(1, 8, 8), loss=lambda o, y: o.sum(1))
    with pytest.raises(ApicalError, match="input_shape"):
        learner.credit(torch.randn(2, 1, 8, 8), torch.randn(2, 7))
