"""Any module: with feedback weights equal to W a rule is backpropagation; with others it is what it is on layers."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import apical
from own_networks import FAMILY, NETWORKS, STORED, Raw, gradients_of, prepare, run, tie_feedback_to_weights
from reference import assert_all_same, assert_same


def prefixed(model: nn.Module) -> dict[str, Tensor]:
    return {f"model.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}


def of_model(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: g for name, g in grads.items() if name.startswith("model.")}


@pytest.mark.parametrize("rule", ["bp", *STORED])
@pytest.mark.parametrize("name", list(NETWORKS))
def test_with_feedback_weights_equal_to_w_the_gradients_are_autograds(name: str, rule: str) -> None:
    own, model, reference, x = prepare(name)
    learner = own.make(rule, model, x)
    if rule != "bp":
        tie_feedback_to_weights(learner)
    grads = gradients_of(learner, lambda: run(learner, x))
    run(reference, x).backward()
    assert_all_same(of_model(grads), prefixed(reference))
    for (key, buffer), (_, expected) in zip(model.named_buffers(), reference.named_buffers(), strict=True):
        assert torch.equal(buffer, expected), key


@pytest.mark.parametrize("name", list(NETWORKS))
def test_with_other_feedback_weights_the_gradients_below_are_others(name: str) -> None:
    own, model, reference, x = prepare(name)
    learner = own.make("fa", model, x)
    grads = gradients_of(learner, lambda: run(learner, x))
    run(reference, x).backward()
    expected = prefixed(reference)
    lowest = own.make("fa", copy.deepcopy(reference), x).network.layers[0].weight
    assert not torch.allclose(grads[lowest], expected[lowest])


MASKED: dict[str, Callable[[], dict[str, Any]]] = {
    "padding": lambda: {"key_padding_mask": torch.tensor([[False] * 4, [False] * 3 + [True], [False] * 4])},
    "boolean": lambda: {"attn_mask": torch.rand(5, 4) < 0.2},
    "per head": lambda: {"attn_mask": torch.randn(6, 5, 4), "average_attn_weights": False},
    "both": lambda: {"attn_mask": torch.randn(5, 4), "key_padding_mask": torch.randn(3, 4)},
}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"kdim": 6, "vdim": 7},
        {"batch_first": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("mask", list(MASKED))
def test_attention_takes_all_its_options(options: dict[str, Any], mask: str, need_weights: bool) -> None:
    model = nn.MultiheadAttention(8, 2, **options).double()
    reference = copy.deepcopy(model)
    sizes = ((5, 8), (4, options.get("kdim", 8)), (4, options.get("vdim", 8)))
    batch_first = options.get("batch_first", False)
    query, key, value = (torch.randn(3, n, d).double() for n, d in sizes)
    inputs = [query, key, key if "kdim" not in options and mask == "padding" else value]
    inputs = inputs if batch_first else [t.transpose(0, 1) for t in inputs]
    given = {k: v.double() if v.is_floating_point() else v for k, v in MASKED[mask]().items() if torch.is_tensor(v)}
    given |= {k: v for k, v in MASKED[mask]().items() if not torch.is_tensor(v)}
    learner = apical.make("fa", model, output=0)
    tie_feedback_to_weights(learner)
    outputs = [m(*inputs, need_weights=need_weights, **given) for m in (learner, reference)]
    for m, (out, scores) in zip((model, reference), outputs, strict=True):
        (out.square().mean() + (0 if scores is None else scores.square().sum())).backward()
        assert m.out_proj.weight.grad is not None
    assert_same(outputs[0][0], outputs[1][0])
    assert_all_same(prefixed(model), prefixed(reference))


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_packed_sequences_and_initial_states_are_those_of_torch(kind: type[nn.RNNBase]) -> None:
    model = kind(4, 5, num_layers=2, bidirectional=True).double()
    reference, x = copy.deepcopy(model), torch.randn(6, 3, 4).double()
    packed = nn.utils.rnn.pack_padded_sequence(x, [2, 6, 4], enforce_sorted=False)
    h, c = torch.randn(4, 3, 5).double(), torch.randn(4, 3, 5).double()
    learner = apical.make("fa", model, output=0)
    tie_feedback_to_weights(learner)
    for m in (learner, reference):
        out, state = m(packed, (h, c) if kind is nn.LSTM else h)
        last = state if isinstance(state, Tensor) else sum(state)
        (out.data.square().sum() + last.square().sum()).backward()
    assert_all_same(prefixed(model), prefixed(reference))
    model.eval()
    with torch.no_grad():
        assert_same(learner(x[:, 0])[0], reference(x[:, 0])[0])


RAW: dict[str, Callable[[Raw, Tensor], Tensor]] = {
    "matmul": lambda m, h: h @ m.w,
    "transposed": lambda m, h: F.linear(h, m.w.t(), m.b),
    "keywords": lambda m, h: F.linear(h, weight=m.w.T, bias=m.b),
    "a factor by name": lambda m, h: (
        torch.matmul(h, other=m.w) + torch.mm(input=h.flatten(0, 1), mat2=m.w).view(2, 6, 3)
    ),
    "einsum": lambda m, h: torch.einsum("io,bti->bto", m.w, h),
    "addmm": lambda m, h: torch.addmm(m.b, h.flatten(0, 1), m.w, beta=2.0, alpha=0.5),
    "bmm": lambda m, h: torch.baddbmm(m.b, h, m.w.expand(len(h), 5, 3)),
    "a vector": lambda m, h: h @ m.g,
    "from the left": lambda m, h: m.w.t() @ h.transpose(1, 2),
    "slices": lambda m, h: F.linear(h, m.w[:, :2].t()) + F.linear(h, m.w[:, 1:].t()),
    "chunks": lambda m, h: sum(h @ part for part in m.w.unsqueeze(0).unbind()[0].chunk(1, 1)),
    "a list": lambda m, h: h @ m.parts[0] @ m.parts[1],
    "scaled": lambda m, h: h @ (0.5 * m.w),
    "convolution": lambda m, h: F.conv1d(h.transpose(1, 2), m.w.t().unsqueeze(-1), m.b),
    "tied look-up": lambda m, h: F.linear(m.table(torch.arange(6)) + h, m.table.weight),
    "another's weights": lambda m, h: F.linear(h, m.fc.weight.t()),
    "gain and position": lambda m, h: h * torch.sigmoid(m.g) + m.position[:, : h.shape[1]],
}


@pytest.mark.parametrize("rule", ["fa", "dll:kolen-pollack"])
@pytest.mark.parametrize("act", list(RAW))
def test_parameters_that_the_code_multiplies_get_feedback_weights(act: str, rule: str) -> None:
    torch.manual_seed(0)
    model, x = Raw(RAW[act]).double(), torch.randn(2, 6, 4).double()
    reference = copy.deepcopy(model)
    learner = apical.make(rule, model, example=x)
    has_product = act != "gain and position"
    assert any(theta is not None for theta in learner.feedback_weights) == has_product
    before = gradients_of(learner, lambda: run(learner, x))
    run(reference, x).backward()
    expected = prefixed(reference)
    assert torch.allclose(before["model.fc.weight"], expected["model.fc.weight"]) != has_product
    tie_feedback_to_weights(learner)
    assert_all_same(of_model(gradients_of(learner, lambda: run(learner, x))), expected)


def test_a_kolen_pollack_theta_mirrors_the_whole_gradient_of_a_tied_embedding() -> None:
    own, model, _, x = prepare("gpt")
    learner = own.make("dll:kolen-pollack", model, x)
    gradients_of(learner, lambda: run(learner, x))
    pairs = list(zip(learner.forward_weights, learner.feedback_weights, strict=True))
    assert any(w is model.tokens.weight for w, _ in pairs)
    for w, theta in pairs:
        assert theta is not None
        assert torch.equal(theta.grad, w.grad)
        assert theta.grad.data_ptr() != w.grad.data_ptr()


class Wrapped(nn.Module):
    """A Sequential that is not read as layers, because it is inside of a module."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 6, 2, padding="same", groups=2),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(24, 5),
        nn.SELU(),
        nn.Linear(5, 3, bias=False),
    ).double()


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
@pytest.mark.parametrize("rule", [*FAMILY, "readout"])
def test_on_a_sequential_the_general_reading_equals_the_layered_one(rule: str, loss: str) -> None:
    torch.manual_seed(0)
    net, x, y = convolutional(), torch.randn(6, 1, 6, 6).double(), torch.randint(0, 3, (6,))
    head = {"head": "net.7"} if rule == "readout" else {}
    layered = apical.make(rule, copy.deepcopy(net), loss=loss)
    general = apical.make(rule, Wrapped(net), loss=loss, example=x, **head)
    assert (layered.network.is_general, general.network.is_general) == (False, True)
    if rule in STORED:
        for theta, other in zip(general.feedback_weights, layered.feedback_weights, strict=True):
            assert (theta is None) == (other is None)
            if theta is not None:
                theta.data.copy_(other)
    results = []
    for learner in (layered, general):
        credit = learner.credit(x, y)
        results.append((credit, {n.replace("net.", ""): p.grad for n, p in learner.named_parameters()}))
    (one, grads), (other, others) = results
    assert_same(other.loss, one.loss)
    assert_same(other.output, one.output)
    present = {name: g for name, g in others.items() if g is not None}
    assert_all_same(present, {name: g for name, g in grads.items() if g is not None})


@pytest.mark.parametrize("through", ["learner", "model"])
@pytest.mark.parametrize("rule", [*FAMILY, "readout"])
def test_backward_on_a_sequential_is_the_rule(rule: str, through: str) -> None:
    torch.manual_seed(0)
    model, x, y = convolutional(), torch.randn(6, 1, 6, 6).double(), torch.randint(0, 3, (6,))
    learner = apical.make(rule, model)
    learner.credit(x, y)
    expected = {name: p.grad.clone() for name, p in learner.named_parameters() if p.grad is not None}
    call = learner if through == "learner" else model
    assert_all_same(gradients_of(learner, lambda: F.cross_entropy(call(x), y)), expected)


@pytest.mark.parametrize("rule", ["bp", "fa", "dll:kolen-pollack"])
def test_backward_on_an_elman_and_a_parallel_is_the_rule(rule: str) -> None:
    torch.manual_seed(0)
    elman = apical.Elman(nn.RNN(3, 4, batch_first=True), nn.Linear(4, 2)).double()
    branches = [nn.Sequential(nn.Linear(3, n), nn.Tanh()) for n in (2, 4)]
    fan = nn.Sequential(nn.Linear(3, 3), apical.Parallel(*branches), nn.Linear(6, 2)).double()
    x, y = torch.randn(4, 5, 3).double(), torch.randint(0, 2, (4, 5))
    for model, at, targets in ((elman, x, y), (fan, x[:, 0], y[:, 0])):
        learner = apical.make(rule, model)
        learner.credit(at, targets)
        expected = {name: p.grad.clone() for name, p in learner.named_parameters() if p.grad is not None}
        loss = lambda m=model, a=at, t=targets: F.cross_entropy(m(a).flatten(0, -2), t.flatten())  # noqa: E731
        assert_all_same(gradients_of(learner, loss), expected)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("terms", ["examples", "tokens"])
def test_theta_learns_from_the_mean_over_terms_of_each_uses_own_product(sign: float, terms: str) -> None:
    """By hand: ξ = −∂Σloss/∂u of the output, δ and ξ of each use, and Θ.grad = ±(1/N) Σ δ ξᵀ, with BatchNorm below."""
    torch.manual_seed(0)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.shared = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(self.first(x).flatten(0, -2)).unflatten(0, x.shape[:-1])
            return self.shared(torch.tanh(self.shared(h)))

    model = Twice().double()
    rule = "dll" if sign > 0 else "dll:released"
    shape = (6, 4) if terms == "examples" else (3, 2, 4)
    x, y = torch.randn(shape).double(), torch.randint(0, 5, shape[:-1])
    learner = apical.make(rule, model, example=x)
    theta = learner.feedback_weights[1].detach()
    h = model.norm(model.first(x).flatten(0, -2)).detach()
    u = torch.tanh(F.linear(h, model.shared.weight, model.shared.bias)).detach()
    out = F.linear(u, model.shared.weight, model.shared.bias).detach()
    delta2 = F.one_hot(y.flatten(), 5) - out.softmax(1)
    xi2 = delta2 @ theta
    delta1 = xi2 * (1 - u.square())
    xi1 = delta1 @ theta
    expected = sign * (delta2.t() @ xi2 + delta1.t() @ xi1) / 6
    learner.credit(x, y)
    assert_same(learner.feedback_weights[1].grad, expected)
    learner.zero_grad()
    if terms == "tokens":
        learner.error_scale = 6
    F.cross_entropy(learner(x).flatten(0, -2), y.flatten()).backward()
    assert_same(learner.feedback_weights[1].grad, expected)
    assert_same(model.shared.bias.grad, -(delta2.sum(0) + delta1.sum(0)) / 6)


OPERATIONS = ("linear", "shared", "norm", "raw", "add", "multiply", "attend", "convolve")


class Graph(nn.Module):
    """A random directed acyclic graph: each node is an operation on earlier nodes."""

    def __init__(self, nodes: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.nodes, self.shared = nodes, nn.Linear(4, 4)
        self.inner = nn.ModuleList([self._module(kind) for kind, _, _ in nodes])
        self.raw = nn.ParameterList([nn.Parameter(torch.randn(4, 4) / 2) for _ in nodes])

    def _module(self, kind: str) -> nn.Module:
        made = {"linear": lambda: nn.Linear(4, 4), "norm": lambda: nn.LayerNorm(4)}
        made |= {"attend": lambda: nn.MultiheadAttention(4, 2, batch_first=True)}
        made |= {"convolve": lambda: nn.Conv1d(3, 3, 3, padding=1)}
        return made.get(kind, nn.Identity)()

    def forward(self, x: Tensor) -> Tensor:
        values = [torch.tanh(self.shared(x))]
        for i, (kind, a, b) in enumerate(self.nodes):
            one, other = values[a % len(values)], values[b % len(values)]
            if kind == "attend":
                new = self.inner[i](one, other, other, need_weights=False)[0]
            elif kind in ("add", "multiply"):
                new = one + other if kind == "add" else one * torch.sigmoid(other)
            else:
                new = one @ self.raw[i] if kind == "raw" else (self.shared if kind == "shared" else self.inner[i])(one)
            values.append(torch.tanh(new))
        return sum(values)


nodes = st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6)


@given(nodes=nodes, rule=st.sampled_from(STORED), seed=st.integers(0, 99))
def test_random_graphs_are_backpropagation_with_feedback_weights_equal_to_w(
    nodes: list[tuple[str, int, int]], rule: str, seed: int
) -> None:
    torch.manual_seed(seed)
    model, x = Graph(nodes).double(), torch.randn(2, 3, 4).double()
    reference = copy.deepcopy(model)
    learner = apical.make(rule, model, example=x)
    tie_feedback_to_weights(learner)
    grads = gradients_of(learner, lambda: run(learner, x))
    run(reference, x).backward()
    assert_all_same(of_model(grads), prefixed(reference))


class Normalised(nn.Module):
    """Weights of different sizes behind a normalisation, one of them zero at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.narrow, self.zero = (nn.Linear(100, 100, bias=False) for _ in range(4))
        self.norm = nn.LayerNorm(100)
        for layer, std in ((self.wide, 3.0), (self.narrow, 0.01), (self.zero, 0.0)):
            nn.init.normal_(layer.weight, std=std)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.wide, self.narrow):
            x = self.norm(layer(x)).relu()
        return x + self.zero(x)


@pytest.mark.parametrize("theta", ["paper", "kolen-pollack"])
def test_theta_starts_as_wide_as_each_weight(theta: str) -> None:
    """Where a normalisation makes up for the size of W, errors keep theirs only if Θ has the size of W."""
    learner = apical.make(f"dll:{theta}", Normalised(), input_shape=(100,))
    first, *spreads = (None if t is None else t.std().item() for t in learner.feedback_weights)
    assert first is None
    assert spreads == pytest.approx([3.0, 0.01, 0.1], rel=0.05)  # one over the root of the fan-out, where W is zero
    given = apical.make(f"dll:{theta}", Normalised(), input_shape=(100,), theta_std=0.5)
    assert [t.std().item() for t in given.feedback_weights[1:]] == pytest.approx([0.5] * 3, rel=0.05)
