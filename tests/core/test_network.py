"""An nn.Sequential read as layers: what is read, and that it computes what the model computes."""

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

import apical
from apical.core.sequential import SequentialNetwork
from cases import CASES
from reference import assert_same, layers_of
from strategies import Case, networks

pytestmark = pytest.mark.no_cover  # other tests run these lines, too, and coverage doubles the time


def params_of(model: nn.Module) -> dict[str, Tensor]:
    return {f"model.{name}": p.detach() for name, p in model.named_parameters()}


@given(case=networks())
def test_the_network_computes_what_the_model_computes(case: Case) -> None:
    network, params = SequentialNetwork(case.model), params_of(case.model)
    expected = case.model(case.x).detach()
    assert_same(network.predict(params, case.x, {}), expected)
    trace = network.forward(params, case.x, {})
    assert_same(trace.output, expected)


@given(case=networks())
def test_the_trace_holds_what_each_layer_received(case: Case) -> None:
    received: list[Tensor] = []
    network = SequentialNetwork(case.model)
    layers = layers_of(case.model)
    hooks = [m.register_forward_pre_hook(lambda _, args: received.append(args[0].clone())) for m in layers]
    case.model(case.x)
    for hook in hooks:
        hook.remove()
    trace = network.forward(params_of(case.model), case.x, {})
    assert len(trace.inputs) == len(trace.pullbacks) == len(network) == len(layers)
    for u, expected in zip(trace.inputs, received, strict=True):
        assert_same(u, expected.detach())


@given(case=networks())
def test_shapes_are_those_that_a_pass_shows(case: Case) -> None:
    network = SequentialNetwork(case.model)
    drives: list[Tensor] = []
    layers = layers_of(case.model)
    hooks = [m.register_forward_hook(lambda _m, _a, out: drives.append(out)) for m in layers]
    output = case.model(case.x)
    for hook in hooks:
        hook.remove()
    shapes = network.shapes(case.input_shape)
    trace = network.forward(params_of(case.model), case.x, {})
    assert shapes.inputs == [u.shape[1:] for u in trace.inputs]
    assert shapes.drives == [a.shape[1:] for a in drives]
    assert shapes.output == output.shape[1:]


@given(case=networks())
def test_layers_carry_the_names_of_the_models_own_parameters(case: Case) -> None:
    network = SequentialNetwork(case.model)
    named = {f"model.{name}": p for name, p in case.model.named_parameters()}
    for layer, module in zip(network.layers, layers_of(case.model), strict=True):
        assert named[layer.weight] is module.weight
        assert (layer.bias is None) == (module.bias is None)
        if layer.bias is not None:
            assert named[layer.bias] is module.bias
    assert {n for layer in network.layers for n in (layer.weight, layer.bias) if n} == set(named)


def test_nested_sequentials_are_read_in_the_order_in_which_they_run() -> None:
    model = nn.Sequential(
        nn.Flatten(),
        nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, 3)), nn.Sequential()),
        nn.ReLU(),
        nn.Linear(3, 2),
    )
    network = SequentialNetwork(model)
    assert [layer.name for layer in network.layers] == ["1.0", "1.1.1", "3"]
    assert [[s.name for s in layer.neuron.stages] for layer in network.layers] == [["1.1.0"], ["2"], []]
    assert [s.name for s in network.prefix.stages] == ["0"]


def test_layers_may_have_names() -> None:
    model = nn.Sequential()
    model.add_module("hidden", nn.Linear(4, 3))
    model.add_module("squash", nn.Tanh())
    model.add_module("out", nn.Linear(3, 2, bias=False))
    assert [(layer.weight, layer.bias) for layer in SequentialNetwork(model).layers] == [
        ("model.hidden.weight", "model.hidden.bias"),
        ("model.out.weight", None),
    ]


def test_an_activation_may_be_used_twice() -> None:
    tanh = nn.Tanh()
    model = nn.Sequential(nn.Linear(4, 3), tanh, nn.Linear(3, 3), tanh, nn.Linear(3, 2)).double()
    network, x = SequentialNetwork(model), torch.randn(5, 4, dtype=torch.float64)
    assert [len(layer.neuron.stages) for layer in network.layers] == [1, 1, 0]
    assert_same(network.predict(params_of(model), x, {}), model(x).detach())


def test_a_dropout_used_twice_draws_twice() -> None:
    dropout = nn.Dropout(0.5)
    model = nn.Sequential(dropout, nn.Linear(30, 30), dropout, nn.Linear(30, 2))
    noise = SequentialNetwork(model).draw(torch.randn(5, 30))
    assert set(noise) == {"0", "2"}
    assert not torch.equal(noise["0"], noise["2"])


def test_a_users_own_module_without_parameters_is_part_of_phi() -> None:
    class Square(nn.Module):
        def forward(self, a: Tensor) -> Tensor:
            return a * a

    model = nn.Sequential(nn.Linear(4, 3), Square(), nn.Linear(3, 2)).double()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.randint(0, 2, (5,))
    apical.make("bp", model).credit(x, y)
    (expected,) = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), model[0].weight)
    assert_same(model[0].weight.grad, expected)


def test_a_subclass_of_sequential_or_linear_without_a_forward_of_its_own_is_read() -> None:
    class Block(nn.Sequential):
        pass

    class Wide(nn.Linear):
        pass

    assert len(SequentialNetwork(Block(Wide(4, 3), nn.Tanh(), Block(nn.Linear(3, 2))))) == 2


def test_a_lazy_layer_is_read_once_it_has_seen_an_input() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Tanh(), nn.Linear(3, 2))
    model(torch.randn(5, 4))
    assert len(SequentialNetwork(model)) == 2


@pytest.mark.parametrize("name", list(CASES))
def test_layers_below_the_lowest_that_learns_have_no_derivative(name: str) -> None:
    case = CASES[name].case()
    case.model.eval()
    network = SequentialNetwork(case.model)
    for bottom in range(len(network)):
        trace = network.forward(params_of(case.model), case.x, {}, bottom)
        below = [tier.last < bottom for tier in network.tiers for _ in tier.layers]
        assert [p is None for p in trace.pullbacks] == below
        assert_same(trace.output, case.model(case.x.clone()).detach())


def test_sizes_follow_from_the_first_linear_or_from_the_input() -> None:
    network = SequentialNetwork(nn.Sequential(nn.Flatten(), nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 2)))
    assert network.shapes() == network.shapes((2, 3))
    assert network.shapes((6,)).inputs == [torch.Size([6]), torch.Size([3])]
