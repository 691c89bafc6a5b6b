"""What cannot be trained by a rule is refused in a sentence that names it, before anything is trained."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import apical
from own_networks import FAMILY, GPT, NETWORKS, Raw, ResNet, gradients_of, prepare, run
from reference import assert_all_same

OUTSIDE = [name for name in apical.rule_names() if name not in [*FAMILY, "readout"]]


def refused(call: Callable[[], object], *words: str) -> None:
    with pytest.raises(apical.ApicalError) as found:
        call()
    text = str(found.value)
    assert "\n" not in text
    for word in words:
        assert word in text, f"{word!r} is not in: {text}"


@pytest.mark.parametrize("rule", OUTSIDE)
def test_backward_on_the_output_of_any_other_rule_is_refused(rule: str) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    learner = apical.make(rule, model)
    x = torch.rand(5, 4)
    with torch.no_grad():
        learner(x)
    output = learner(x)
    if output.requires_grad:
        output -= output.detach().amax(1, keepdim=True)  # what is refused may still be written into
        refused(lambda output=output: output.sum().backward(), rule.split(":")[0], "credit", "step")
    assert all(p.grad is None for p in model.parameters())


def test_backward_with_sweeps_and_of_a_rule_of_ones_own_is_refused() -> None:
    class Mine(apical.DLL):
        NAME = "mine-outside"

        def carry(self, *args: Any) -> Any:
            return super().carry(*args)

    try:
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        for learner in (apical.make("dll", model, sweeps=2), Mine(model)):
            refused(lambda learner=learner: learner(torch.randn(5, 4)).sum().backward(), "credit")
        refused(lambda: Mine(ResNet()), "ResNet", "nn.Sequential")
    finally:
        del apical.RULES["mine-outside"]
    refused(lambda: apical.make("dll", ResNet(), sweeps=2), "sweeps")


@pytest.mark.parametrize("model", ["elman", "parallel"])
def test_where_several_uses_share_an_error_the_quadratic_rules_are_left_to_credit(model: str) -> None:
    elman = apical.Elman(nn.RNN(3, 4, batch_first=True), nn.Linear(4, 2))
    fan = nn.Sequential(nn.Linear(3, 3), apical.Parallel(nn.Linear(3, 2), nn.Linear(3, 2)), nn.Linear(4, 2))
    learner = apical.make("dll", elman if model == "elman" else fan)
    refused(lambda: learner(torch.randn(4, 5, 3) if model == "elman" else torch.randn(4, 3)).sum().backward(), "credit")


class Planted(torch.autograd.Function):
    """A product that sends its error through W, as backpropagation does."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(h, w)
        return h @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        h, w = ctx.saved_tensors
        return g @ w.t(), h.flatten(0, 1).t() @ g.flatten(0, 1)


UNKNOWN: dict[str, tuple[Callable[[Raw, Tensor], Tensor], str, str]] = {
    "planted transport": (lambda m, h: Planted.apply(h, m.w), "model.w", "Planted"),
    "normalised": (lambda m, h: F.linear(h, m.w.t() / m.w.norm()), "model.w", "norm"),
    "masked": (lambda m, h: h @ (m.w * torch.ones(5, 3).double()), "model.w", "Mm"),
    "noisy": (lambda m, h: h @ (m.w + torch.ones(5, 3).double()), "model.w", "Mm"),
    "softmax": (lambda m, h: h @ m.w.softmax(0), "model.w", "softmax"),
    "disguised": (lambda m, h: (h.unsqueeze(-2) * m.w.t()).sum(-1), "model.w", "mul"),
    "disguised and expanded": (
        lambda m, h: (h.unsqueeze(-2).expand(-1, -1, 3, -1) * m.w.t()).sum(-1),
        "model.w",
        "mul",
    ),
    "two parameters": (lambda m, h: h @ (m.w @ m.w.t()), "model.w", "matmul"),
    "distances": (lambda m, h: torch.cdist(h, m.w.t().unsqueeze(0)), "model.w", "cdist"),
    "another's weights, masked": (
        lambda m, h: F.linear(h, m.fc.weight.t() * torch.ones(4, 5).double()),
        "fc.weight",
        "Mm",
    ),
    "joined": (lambda m, h: h @ torch.cat([m.parts[0], m.parts[1]], 1), "model.parts.0", "Mm"),
}


@pytest.mark.parametrize("rule", ["fa", "dll:kolen-pollack"])
@pytest.mark.parametrize("what", list(UNKNOWN))
def test_a_weight_that_acts_in_an_unknown_way_is_refused_by_parameter_and_operation(what: str, rule: str) -> None:
    act, parameter, operation = UNKNOWN[what]
    model, x = Raw(act).double(), torch.randn(2, 6, 4).double()
    state = copy.deepcopy(model.state_dict())
    refused(lambda: apical.make(rule, model, example=x), parameter, operation)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert type(model.fc) is nn.Linear
    assert not hasattr(model, "link")
    expected = gradients_of(model, lambda: run(model, x))
    learner = apical.make("bp", model, example=x)
    assert set(gradients_of(learner, lambda: run(learner, x))) == {f"model.{name}" for name in expected}


def test_a_raw_weight_is_refused_by_name_where_no_example_is_given() -> None:
    refused(lambda: apical.make("fa", Raw(lambda m, h: h @ m.w)), "model.w", "example")
    refused(lambda: apical.make("dll", GPT()), "model.positions", "example")

    class Vector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.v = nn.Linear(4, 5), nn.Parameter(torch.randn(5))

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) @ self.v

    learner = apical.make("fa", Vector())
    refused(lambda: learner(torch.randn(2, 4)), "model.v", "example")


def test_a_later_branch_that_uses_a_weight_in_another_way_is_refused_when_it_runs() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.position, self.calls = nn.Linear(5, 5), nn.Parameter(torch.randn(5, 5)), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            h = self.fc(x) + self.position
            return h if self.calls < 3 else h @ self.position

    model, x = Late(), torch.randn(5, 5)
    learner = apical.make("fa", model, example=x)
    learner(x)
    refused(lambda: learner(x), "model.position")


def test_what_does_not_exist_yet_or_is_computed_is_refused() -> None:
    class Net(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    refused(lambda: apical.make("fa", Net(nn.LazyLinear(3))), "model.layer.weight", "run the model once")
    refused(
        lambda: apical.make("fa", Net(parametrizations.weight_norm(nn.Linear(4, 3)))), "model.layer.weight", "computed"
    )
    refused(lambda: apical.make("fa", Net(nn.ReLU())), "no weights")
    refused(lambda: apical.make("fa", ResNet().to("meta")), "meta")


def test_a_module_that_was_replaced_is_refused() -> None:
    own, model, _, x = prepare("resnet")
    learner = own.make("fa", model, x)
    model.fc = nn.Linear(5, 3).double()
    refused(lambda: learner(x), "model.fc", "changed")
    refused(lambda: model(x), "model.fc", "changed")


def test_a_model_that_returns_no_tensor_is_refused_until_a_field_is_named() -> None:
    class Both(nn.Module):
        def __init__(self, kind: type) -> None:
            super().__init__()
            self.fc, self.kind = nn.Linear(4, 3), kind

        def forward(self, x: Tensor) -> Any:
            scores = self.fc(x)
            return {"logits": scores, "other": x} if self.kind is dict else (x, scores)

    x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
    for kind, field in ((dict, "logits"), (tuple, 1)):
        refused(lambda kind=kind: apical.make("fa", Both(kind)).credit(x, y), kind.__name__, "output=")
        refused(lambda kind=kind: apical.make("fa", Both(kind), output="nothing").credit(x, y), "nothing")
        credit = apical.make("fa", Both(kind), output=field).credit(x, y)
        assert credit.output.shape == (5, 3)


def test_inputs_may_be_several_or_named() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(2, 3)

        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            return self.a(x) + self.b(other)

    x, other, y = torch.randn(5, 4), torch.randn(5, 2), torch.randint(0, 3, (5,))
    model = Sum()
    learner = apical.make("dll:kolen-pollack", model, example=(x, other))
    assert learner.feedback_weights == [None, None]
    one = learner.credit((x, other), y)
    assert torch.equal(learner.credit({"x": x, "other": other}, y).output, one.output)


def test_ambiguous_labels_a_bad_example_and_bad_options_are_refused() -> None:
    tokens = torch.randint(0, 7, (2, 5))
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 5))
    refused(lambda: apical.make("fa", model).credit(tokens, torch.zeros(2, 5, dtype=torch.long)), "second", "last")
    refused(lambda: apical.make("fa", model, example=torch.randn(2, 5)), "example")
    refused(lambda: apical.make("pc", ResNet(), example=torch.randn(2, 1, 6, 6)), "pc", "example")
    refused(lambda: apical.make("pc", ResNet()), "ResNet")
    refused(lambda: apical.make("readout", ResNet()), "head", "fc")
    refused(lambda: apical.make("readout", ResNet(), head="fz"), "fz")
    learner = apical.make("readout", ResNet(), head="blocks")
    refused(lambda: learner(torch.randn(2, 1, 6, 6)), "model.fc.weight", "blocks")
    learner = apical.make("dll", ResNet())
    for scale in (0, -1.0, float("nan"), "8"):
        refused(lambda scale=scale: setattr(learner, "error_scale", scale), "error_scale")


def test_a_second_derivative_and_a_part_by_itself_are_refused() -> None:
    own, model, _, x = prepare("resnet")
    learner = own.make("dll", model, x)
    refused(lambda: torch.autograd.grad(run(learner, x), model.fc.weight, create_graph=True), "again", "create_graph")
    part = model.blocks(torch.randn(2, 3, 6, 6).double())
    refused(lambda: part.sum().backward(), "error_scale")
    learner.error_scale = 2
    model.blocks(torch.randn(2, 3, 6, 6).double()).sum().backward()


class TimeFirst(nn.Module):
    """A recurrent module that takes (time, batch, values), as torch's own do by default."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.fc = nn.RNN(3, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.rnn(x)[0][-1])


@pytest.mark.parametrize("rule", ["dll", "dll:released"])
def test_with_the_time_axis_first_the_number_of_examples_must_be_told(rule: str) -> None:
    """ΔΘ is quadratic in the error, so `backward()` on a mean must know over how many examples it is."""
    learner, x, y = apical.make(rule, TimeFirst()), torch.randn(7, 4, 3), torch.tensor([0, 1, 0, 1])
    refused(lambda: learner(x), "7 rows", "4", "error_scale")
    with torch.no_grad():
        assert learner(x).shape == (4, 2)
    learner.credit(x, y)  # which knows
    expected = {name: p.grad.clone() for name, p in learner.named_parameters() if p.grad is not None}
    learner.zero_grad()
    learner.error_scale = 4
    nn.functional.cross_entropy(learner(x), y).backward()
    assert_all_same({name: p.grad for name, p in learner.named_parameters() if p.grad is not None}, expected, 1e-5)


def test_weights_and_feedback_weights_on_two_devices_are_refused() -> None:
    own, model, _, x = prepare("resnet")
    learner = own.make("fa", model, x)
    learner.feedback.to("meta")
    refused(lambda: learner(x), "meta", "cpu", "learner.to")


def test_credit_works_without_gradients_and_is_refused_in_inference_mode() -> None:
    own, model, _, x = prepare("resnet")
    learner = own.make("fa", model, x)
    y = torch.randint(0, 3, (len(x),))
    with torch.no_grad():
        learner.credit(x, y)
    assert model.stem.weight.grad is not None
    with torch.inference_mode():
        refused(lambda: learner.credit(x, y), "inference_mode")


def test_the_gradient_of_the_input_is_not_that_of_a_transported_weight() -> None:
    own, model, _, x = prepare("resnet")
    learner = own.make("fa", model, x)
    at = x.clone().requires_grad_()
    run(learner, at).backward()
    tied, reference = prepare("resnet")[2], at.clone().detach().requires_grad_()
    run(tied, reference).backward()
    assert at.grad is None or not torch.allclose(at.grad, reference.grad)


@pytest.mark.parametrize("name", list(NETWORKS))
def test_forward_and_feedback_weights_are_lists_of_equal_length_in_the_order_of_the_modules(name: str) -> None:
    own, model, _, x = prepare(name)
    learner = own.make("fa", model, x)
    run(learner, x)
    w, b = learner.forward_weights, learner.feedback_weights
    assert len(w) == len(b) == len({id(p) for p in w})
    assert all(theta is None or theta.shape == p.shape for p, theta in zip(w, b, strict=True))
    positions = {id(p): i for i, p in enumerate(p for m in model.modules() for p in m._parameters.values())}
    order = [positions[id(p)] for p in w]
    assert order == sorted(order)
    reads_input = {"gpt": 0, "rnn": 1, "lstm": 2, "projected lstm": 1, "gru": 2}
    assert sum(theta is None for theta in b) == reads_input.get(name, 1)
