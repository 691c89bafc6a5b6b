"""Weight and node perturbation against finite differences by hand, directional derivatives and the law of averages."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import apical
from apical.engine.replicas import ReplicaStack
from apical.engine.settings import Settings
from apical.errors import ApicalError
from cases import CASES, learner_for
from reference import assert_all_same, assert_same, autograd, credited, layers_of, leaves, of_model
from strategies import Case

SMALL = 1e-4


def cnn() -> nn.Sequential:
    """Groups, strides, padding, and biases in some layers."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 6, 2, groups=2, bias=False),
        nn.Softplus(),
        nn.AvgPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(6, 3),
    ).double()


def mlp() -> nn.Sequential:
    return CASES["mlp"].model().double()


BUILDS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {"mlp": (mlp, (2, 3)), "cnn": (cnn, (2, 5, 5))}
every_network = pytest.mark.parametrize("name", list(BUILDS))
every_loss = pytest.mark.parametrize("loss", ["cross_entropy", "mse"])


def case_of(name: str, batch: int = 5) -> Case:
    build, shape = BUILDS[name]
    model = build()
    return Case(model, torch.randn(batch, *shape, dtype=torch.float64), torch.randint(0, 3, (batch,)))


def per_example(loss: str, output: Tensor, y: Tensor) -> Tensor:
    if loss == "cross_entropy":
        return F.cross_entropy(output, y, reduction="none")
    return (output - F.one_hot(y, 3)).square().sum(1) / 2


def updated(learner: apical.Learner, x: Tensor, y: Tensor, noise: dict[str, Tensor]) -> Any:
    with torch.no_grad():
        return learner.update(learner.params(), dict(learner.named_buffers()), x, y, noise)


class Shaken:
    """The plain model with given noise added to its drives by hooks, each layer's input noted."""

    def __init__(self, model: nn.Sequential, noise: list[Tensor | None]) -> None:
        self.model, self.inputs, self.drives = copy.deepcopy(model), [], []
        for layer, e in zip(layers_of(self.model), noise, strict=True):
            layer.register_forward_hook(lambda _, given, out, e=e: self._note(given[0], out, e))

    def _note(self, given: Tensor, out: Tensor, e: Tensor | None) -> Tensor:
        out = out if e is None else out + e
        self.inputs.append(given)
        self.drives.append(out)
        return out


def ascent(model: nn.Sequential, inputs: list[Tensor], post: list[Tensor]) -> dict[str, Tensor]:
    """Batch means of post × pre for every layer's parameters, by autograd of each layer alone."""
    names = {id(p): f"model.{n}" for n, p in model.named_parameters()}
    grads = {}
    for layer, u, e in zip(layers_of(model), inputs, post, strict=True):
        total = (layer(u.detach()) * e).sum() / len(u)
        for p, g in zip(layer.parameters(), torch.autograd.grad(total, list(layer.parameters())), strict=True):
            grads[names[id(p)]] = g
    return grads


def times(e: Tensor, slope: Tensor) -> Tensor:
    return e * slope.view(-1, *[1] * (e.ndim - 1))


# At any σ: the finite differences, by hand.


@every_loss
@every_network
@pytest.mark.parametrize("antithetic", [True, False])
def test_wp_is_the_difference_of_two_losses_times_the_noise(name: str, loss: str, antithetic: bool) -> None:
    case = case_of(name)
    learner = apical.make("wp", case.model, loss=loss, sigma=0.3, antithetic=antithetic)
    noise = learner.draw(case.x)

    def run(step: float) -> Tensor:
        there = {n: p + step * noise[f"model.{n}"][0] for n, p in case.model.named_parameters()}
        return functional_call(case.model, there, (case.x,)).detach()

    ends = (0.3, -0.3) if antithetic else (0.3, 0.0)
    up, down = (per_example(loss, run(step), case.labels).mean() for step in ends)
    slope = (up - down) / (ends[0] - ends[1])
    update = updated(learner, case.x, case.labels, noise)
    assert_all_same(update.grads, {n: slope * noise[n][0] for n in learner.trainable})
    output = (run(0.3) + run(-0.3)) / 2 if antithetic else run(0.0)
    assert_same(update.output, output)
    assert_same(update.loss, per_example(loss, output, case.labels).mean())


@every_loss
@every_network
def test_np_is_each_examples_own_difference_times_its_own_noise_and_its_mean_input(name: str, loss: str) -> None:
    case = case_of(name)
    learner = apical.make("np", case.model, loss=loss, sigma=0.5)
    noise = learner.draw(case.x)
    xi = [noise[f".drive{i}"] for i in range(3)]
    passes = [Shaken(case.model, [sign * 0.5 * e for e in xi]) for sign in (1, -1)]
    outputs = [one.model(case.x).detach() for one in passes]
    up, down = (per_example(loss, output, case.labels) for output in outputs)
    inputs = [(a + b) / 2 for a, b in zip(passes[0].inputs, passes[1].inputs, strict=True)]
    expected = ascent(case.model, inputs, [times(e, up - down) for e in xi])  # 2σ = 1
    update = updated(learner, case.x, case.labels, noise)
    assert_all_same(update.grads, expected)
    assert_same(update.output, (outputs[0] + outputs[1]) / 2)
    assert_same(update.loss, per_example(loss, update.output, case.labels).mean())


# As σ → 0: projections of the true gradient on the noise.


@every_network
@pytest.mark.parametrize("samples", [1, 3])
def test_wp_projects_the_gradient_on_each_noise(name: str, samples: int) -> None:
    case = case_of(name)
    learner = apical.make("wp", case.model, sigma=SMALL, samples=samples)
    noise = learner.draw(case.x)
    g = autograd(case.model, F.cross_entropy(case.model(case.x), case.labels))
    slopes = sum((noise[n].flatten(1) @ g[n].flatten() for n in g), torch.zeros(samples))
    expected = {n: torch.einsum("k,k...->...", slopes, noise[n]) / samples for n in g}
    assert_all_same(updated(learner, case.x, case.labels, noise).grads, expected, tolerance=1e-6)


def projected(
    model: nn.Sequential, x: Tensor, y: Tensor, xi: list[Tensor | None]
) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
    """Node perturbation's limit for one ξ: the loss' derivative in all drives of an example along its noise."""
    clean = Shaken(model, [None] * len(xi))
    losses = F.cross_entropy(clean.model(x), y, reduction="none")
    delta = torch.autograd.grad(losses.sum(), clean.drives)
    pairs = [(d, e) for d, e in zip(delta, xi, strict=True) if e is not None]
    slope = sum(((d * e).flatten(1).sum(1) for d, e in pairs), torch.zeros(len(x)))
    shaken = [torch.zeros_like(d) if e is None else times(e, slope) for d, e in zip(delta, xi, strict=True)]
    return ascent(model, clean.inputs, shaken), clean.inputs, list(delta)


@every_network
@pytest.mark.parametrize("samples", [1, 3])
def test_np_projects_each_examples_gradient_on_its_noise(name: str, samples: int) -> None:
    case = case_of(name)
    learner = apical.make("np", case.model, sigma=SMALL, samples=samples)
    noise = learner.draw(case.x)
    xi = [noise[f".drive{i}"].chunk(samples) for i in range(3)]
    each = [projected(case.model, case.x, case.labels, [e[k] for e in xi])[0] for k in range(samples)]
    expected = {n: torch.stack([one[n] for one in each]).mean(0) for n in each[0]}
    assert_all_same(updated(learner, case.x, case.labels, noise).grads, expected, tolerance=1e-6)


@pytest.mark.parametrize("rule", ["wp", "np"])
def test_dropout_is_the_same_in_all_passes(rule: str) -> None:
    """Else the difference of the losses would be that of the masks, divided by σ."""
    case = CASES["conv1d with dropout"].case()
    learner = learner_for(rule, case, sigma=SMALL, samples=2)
    noise = learner.draw(case.x)
    update = updated(learner, case.x, case.labels, noise)
    bp = learner_for("bp", case)
    exact = updated(bp, case.x, case.labels, noise)
    assert_same(update.output, exact.output, tolerance=1e-6)
    along = sum(float((update.grads[n] * g).sum()) for n, g in exact.grads.items())
    if rule == "wp":
        slopes = sum(noise[n].flatten(1) @ g.flatten() for n, g in exact.grads.items())
        assert along == pytest.approx(float(slopes.square().mean()), rel=1e-5)
    assert 0 < along < 1e3 * sum(float(g.square().sum()) for g in exact.grads.values())


# The mean over draws.


def squared_errors(learner: apical.Learner, case: Case, exact: dict[str, Tensor], draws: int) -> dict[str, Tensor]:
    """For each parameter, the squared errors of means over n and 16n draws, each averaged over many such means."""
    params = learner.params()
    noise = [learner.draw(case.x) for _ in range(draws)]
    stacked = {n: torch.stack([one[n] for one in noise]) for n in noise[0]}
    run = torch.vmap(lambda e: learner.update(params, {}, case.x, case.labels, e).grads, chunk_size=1024)
    with torch.no_grad():
        grads = run(stacked)
    return {
        n: torch.stack(
            [(grads[n].view(-1, count, *g.shape).mean(1) - g).square().flatten(1).sum(1).mean() for count in (32, 512)]
        )
        for n, g in exact.items()
    }


@every_network
def test_wps_mean_over_draws_comes_to_the_gradient_as_one_over_the_root_of_their_number(name: str) -> None:
    """The variance of one draw's entry i is ‖g‖² + g_i²."""
    case = case_of(name)
    exact = autograd(case.model, F.cross_entropy(case.model(case.x), case.labels))
    errors = squared_errors(apical.make("wp", case.model, sigma=SMALL), case, exact, 8192)
    whole = sum(float(g.square().sum()) for g in exact.values())
    for n, g in exact.items():
        one = g.numel() * whole + float(g.square().sum())
        assert_same(errors[n], torch.tensor([one / 32, one / 512]), tolerance=0.25, what=n)
        assert float(errors[n][0] / errors[n][1]) == pytest.approx(16, rel=0.5)


@every_network
def test_nps_mean_over_draws_comes_to_the_gradient_as_one_over_the_root_of_their_number(name: str) -> None:
    """An example's draw is Σ_m A_m ξ_m (δ·ξ), A the derivative of the layer's drives in its weights: its variance is
    ‖A‖²‖δ‖² + ‖Aᵀδ‖², δ over the drives of all layers in the first factor; the batch mean divides by B²."""
    case = case_of(name, batch=3)
    exact = autograd(case.model, F.cross_entropy(case.model(case.x), case.labels))
    errors = squared_errors(apical.make("np", case.model, sigma=SMALL), case, exact, 8192)
    _, inputs, delta = projected(case.model, case.x, case.labels, [None] * 3)
    names = {id(p): f"model.{n}" for n, p in case.model.named_parameters()}
    for i, layer in enumerate(layers_of(case.model)):
        weights = {n: p.detach() for n, p in layer.named_parameters()}
        one = dict.fromkeys(weights, 0.0)
        for b in range(3):
            u = inputs[i][b : b + 1].detach()
            jacobian = jacrev(lambda w, u=u, layer=layer: functional_call(layer, w, (u,)).flatten())(weights)
            whole = sum(float(d[b].square().sum()) for d in delta)
            for n, a in jacobian.items():
                a = a.flatten(1)
                pulled = a.T @ delta[i][b].flatten()
                one[n] += (float(a.square().sum()) * whole + float(pulled.square().sum())) / 9
        for n, p in layer.named_parameters():
            expected = torch.tensor([one[n] / 32, one[n] / 512])
            assert_same(errors[names[id(p)]], expected, tolerance=0.25, what=names[id(p)])


def test_np_uses_per_example_differences() -> None:
    """The loss of an example with label 0 never changes here: neither its noise nor its input may matter."""
    case = case_of("mlp", batch=2)
    y = torch.tensor([0, 1])

    def second_only(output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output, y, reduction="none") * y

    learner = apical.make("np", case.model, loss=second_only, sigma=SMALL)
    noise = learner.draw(case.x)
    both = updated(learner, case.x, y, noise).grads
    changed = {n: torch.cat([torch.randn_like(e[:1]), e[1:]]) for n, e in noise.items()}
    x = torch.cat([torch.randn_like(case.x[:1]), case.x[1:]])
    assert_all_same(updated(learner, x, y, changed).grads, both)
    assert all(float(g.abs().max()) > 0 for g in both.values())


# What does not learn is not shaken.


@pytest.mark.parametrize("samples", [1, 3])
def test_np_leaves_frozen_layers_alone(samples: int) -> None:
    case = case_of("cnn")
    case.model[0].requires_grad_(False)
    learner = apical.make("np", case.model, sigma=SMALL, samples=samples)
    noise = learner.draw(case.x)
    assert set(noise) == {".drive1", ".drive2"}
    xi = [noise[f".drive{i}"].chunk(samples) for i in (1, 2)]
    case.model.requires_grad_(True)
    each = [projected(case.model, case.x, case.labels, [None, *(e[k] for e in xi)])[0] for k in range(samples)]
    case.model[0].requires_grad_(False)
    grads = updated(learner, case.x, case.labels, noise).grads
    expected = {n: torch.stack([one[n] for one in each]).mean(0) for n in each[0]}
    assert_all_same(grads, {n: g for n, g in expected.items() if not n.startswith("model.0.")}, tolerance=1e-6)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_np_shakes_a_layer_of_which_a_part_learns(frozen: str) -> None:
    case = case_of("mlp")
    getattr(case.model[1], frozen).requires_grad_(False)
    learner = apical.make("np", case.model)
    assert ".drive0" in learner.draw(case.x)
    assert set(credited(learner, case.x, case.labels)) == learner.trainable


def test_np_leaves_a_frozen_layer_in_the_middle_alone() -> None:
    case = case_of("mlp")
    case.model[3].requires_grad_(False)
    learner = apical.make("np", case.model, sigma=SMALL)
    assert set(learner.draw(case.x)) == {".drive0", ".drive2"}
    assert set(credited(learner, case.x, case.labels)) == learner.trainable


def test_wp_in_bfloat16_needs_no_bias() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3, bias=False))
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    apical.fit(model, (x, y, x, y), rule="wp", options={"sigma": 0.03}, epochs=1, precision="bf16", progress=False)


@pytest.mark.parametrize(
    ("rule", "dtype", "works"),
    [("wp", torch.bfloat16, 0.03), ("np", torch.bfloat16, 0.03), ("wp", torch.float32, 5e-7)],
)
def test_a_sigma_that_rounding_swallows_is_refused_with_one_that_works(
    rule: str, dtype: torch.dtype, works: float
) -> None:
    """With the σ that the error names, many draws point along the gradient; with a smaller one they could be zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 5))
    x, y = torch.randn(64, 20), torch.randint(0, 5, (64,))
    wanted = torch.cat(
        [g.flatten() for g in torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))]
    )
    model.to(dtype)
    with pytest.raises(ApicalError, match=f"{dtype} rounds away.*sigma={works:g}, works"):
        apical.make(rule, model, sigma=works / 30).credit(x.to(dtype), y)
    apical.make(rule, model, sigma=works, samples=300).credit(x.to(dtype), y)
    got = torch.cat([p.grad.flatten().float() for p in model.parameters()])
    assert float(F.cosine_similarity(got, wanted, dim=0)) > 0.4


def test_a_sigma_that_bfloat16_products_swallow_is_refused() -> None:
    model, x, y = nn.Sequential(nn.Linear(6, 3)), torch.randn(8, 6), torch.randint(0, 3, (8,))
    with pytest.raises(ApicalError, match=r"torch\.bfloat16 rounds away"):
        apical.fit(model, (x, y, x, y), rule="wp", epochs=1, precision="bf16", progress=False)


def test_wp_shakes_only_what_learns() -> None:
    case = case_of("mlp")
    case.model[1].weight.requires_grad_(False)
    learner = apical.make("wp", case.model)
    assert set(learner.draw(case.x)) == learner.trainable
    assert "model.1.weight" not in learner.trainable


@pytest.mark.parametrize("rule", ["wp", "np"])
def test_nothing_to_train_is_said(rule: str) -> None:
    case = case_of("mlp")
    case.model.requires_grad_(False)
    with pytest.raises(ApicalError, match="nothing is left to train"):
        apical.make(rule, case.model).credit(case.x, case.labels)


# Decorrelation.


def patches(layer: nn.Module, u: Tensor) -> Tensor:
    """What the units of each group see, (groups, samples, fan-in), by torch's own unfold."""
    if isinstance(layer, nn.Linear):
        return u.reshape(1, -1, layer.in_features)
    parts = u.chunk(layer.groups, 1)
    cut = [F.unfold(p, layer.kernel_size, layer.dilation, layer.padding, layer.stride) for p in parts]
    return torch.stack([c.transpose(1, 2).flatten(0, 1) for c in cut])


def decorrelating(name: str, **options: Any) -> tuple[Case, apical.Learner]:
    case = case_of(name)
    learner = apical.make("np", case.model, sigma=SMALL, decorrelate=True, **options)
    for r in learner.buffers():
        r.copy_(r + 0.2 * torch.randn_like(r))
    return case, learner


def folded(case: Case, learner: apical.Learner) -> nn.Sequential:
    """The plain model with W R in W's place, each group's by hand."""
    model = copy.deepcopy(case.model)
    with torch.no_grad():
        for layer, r in zip(layers_of(model), learner.buffers(), strict=True):
            groups = layer.weight.chunk(len(r))
            layer.weight.copy_(torch.cat([(w.flatten(1) @ m).view(w.shape) for w, m in zip(groups, r, strict=True)]))
    return model


@every_network
def test_decorrelation_starts_as_the_identity_and_then_stands_before_every_layer(name: str) -> None:
    case = case_of(name)
    learner = apical.make("np", case.model, decorrelate=True)
    assert_same(learner(case.x), case.model(case.x))
    case, learner = decorrelating(name)
    u = case.x
    for module in leaves(case.model):
        if not isinstance(module, nn.Linear | nn.Conv2d):
            u = module(u)
            continue
        r = list(learner.buffers())[layers_of(case.model).index(module)]
        seen = torch.stack([p @ m.T for p, m in zip(patches(module, u), r, strict=True)])
        w = module.weight.flatten(1).view(len(r), -1, r.shape[-1])
        drive = (seen @ w.mT).transpose(0, 1).flatten(1)  # samples × units
        drive = drive if module.bias is None else drive + module.bias
        u = drive.view(len(u), *module(u).shape[2:], -1).movedim(-1, 1) if u.ndim == 4 else drive
    assert_same(learner(case.x), u)
    assert_same(folded(case, learner)(case.x), u)
    assert not torch.allclose(case.model(case.x), u)


@every_network
def test_with_decorrelation_the_mean_gradient_is_that_of_w_behind_r(name: str) -> None:
    case, learner = decorrelating(name)
    noise = learner.draw(case.x)
    xi: list[Tensor | None] = [noise[f".drive{i}"] for i in range(3)]
    through, _, _ = projected(folded(case, learner), case.x, case.labels, xi)
    expected = dict(through)
    for layer, r in zip(learner.network.layers, learner.buffers(), strict=True):
        g = through[layer.weight]
        rows = [a.flatten(1) @ m.T for a, m in zip(g.chunk(len(r)), r, strict=True)]
        expected[layer.weight] = torch.cat(rows).view(g.shape)  # the chain rule through W R
    assert_all_same(updated(learner, case.x, case.labels, noise).grads, expected, tolerance=1e-6)


@every_network
@pytest.mark.parametrize("samples", [1, 3])
def test_r_loses_what_is_left_of_the_correlations(name: str, samples: int) -> None:
    """Of the correlations between a layer's inputs, each the mean over the passes of a batch."""
    case, learner = decorrelating(name, decorrelation_rate=0.05, samples=samples)
    learner.sigma = 0.3
    noise, plain = learner.draw(case.x), folded(case, learner)
    passes = []
    for k in range(samples):
        for sign in (1, -1):
            xi = [sign * 0.3 * noise[f".drive{i}"].chunk(samples)[k] for i in range(3)]
            shaken = Shaken(plain, xi)
            shaken.model(case.x)
            passes.append(shaken.inputs)
    inputs = [torch.stack(each).mean(0).detach() for each in zip(*passes, strict=True)]
    expected = {}
    for (n, r), layer, u in zip(learner.named_buffers(), layers_of(plain), inputs, strict=True):
        whole = []
        for p, m in zip(patches(layer, u), r, strict=True):
            seen = p @ m.T
            c = seen.T @ seen / len(seen)
            whole.append(m - 0.05 * (c - torch.diag(torch.diag(c))) @ m)
        expected[n] = torch.stack(whole)
    assert_all_same(updated(learner, case.x, case.labels, noise).state, expected)


def test_decorrelation_decorrelates() -> None:
    model = nn.Sequential(nn.Linear(6, 2), nn.Tanh(), nn.Linear(2, 3)).double()
    x = torch.randn(64, 3, dtype=torch.float64) @ torch.randn(3, 6, dtype=torch.float64)
    x = x + 0.3 * torch.randn(64, 6, dtype=torch.float64)
    y = torch.randint(0, 3, (64,))
    learner = apical.make("np", model, decorrelate=True, decorrelation_rate=0.05)
    for _ in range(600):
        learner.credit(x, y)
    seen = x @ learner.decorrelation_0[0].T
    c = seen.T @ seen / 64
    assert float((c - torch.diag(torch.diag(c))).abs().max()) < 1e-3 * float(torch.diag(c).min())
    assert float(torch.diag(c).min()) > 0.01


@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize(("schedule", "shares"), [("linear", (1.0, 0.75, 0.5, 0.25)), ("constant", (1.0,) * 4)])
def test_in_a_run_the_steps_of_r_shrink_as_the_rates_do(schedule: str, shares: tuple[float, ...], seeds: int) -> None:
    """Of the first layer's R, which the noise does not reach and whose inputs, in batches of all, are the same ones."""
    x, y = torch.randn(32, 5, dtype=torch.float64), torch.randint(0, 3, (32,))
    done = apical.fit(
        lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double(),
        (x, y, x, y),
        rule="np",
        epochs=4,
        seeds=seeds,
        batch_size=32,
        schedule=schedule,
        options={"decorrelate": True, "decorrelation_rate": 0.05},
        progress=False,
    )
    r = torch.eye(5, dtype=torch.float64)
    for share in shares:
        c = (x @ r.T).T @ (x @ r.T) / 32
        r = r - share * 0.05 * (c - torch.diag(torch.diag(c))) @ r
    for learner in done.learners:
        assert_same(learner.decorrelation_0[0], r)


def test_a_frozen_layer_keeps_its_r() -> None:
    case, learner = decorrelating("mlp")
    case.model[3].requires_grad_(False)
    before = {n: r.clone() for n, r in learner.named_buffers()}
    learner.credit(case.x, case.labels)
    same = [n for n, r in learner.named_buffers() if torch.equal(r, before[n])]
    assert same == ["decorrelation_1"]


def test_only_with_decorrelation_the_plain_model_does_not_predict() -> None:
    assert apical.make("np", mlp()).MODEL_PREDICTS
    assert not apical.make("np", mlp(), decorrelate=True).MODEL_PREDICTS
    assert apical.NodePerturbation.MODEL_PREDICTS
    assert not list(apical.make("np", mlp()).buffers())


@every_network
def test_decorrelated_seeds_stack_and_compile(name: str) -> None:
    x = torch.randn(2, 8, *BUILDS[name][1], dtype=torch.float64)
    y = torch.randint(0, 3, (2, 8))

    def learner(seed: int) -> apical.Learner:
        torch.manual_seed(seed)
        return apical.make("np", BUILDS[name][0](), decorrelate=True, samples=2)

    plan = Settings("rule", "model", "data", lr=0.05)
    stack = ReplicaStack([learner(0), learner(1)], [plan] * 2, stacked=True)
    alone = [ReplicaStack([learner(s)], [plan], stacked=False) for s in range(2)]
    generators = [[torch.Generator().manual_seed(s) for s in range(2)] for _ in range(2)]
    with torch.no_grad():
        for _ in range(3):
            stack.step(x, y, generators[0], pace=torch.tensor(0.5))
            for s in range(2):
                alone[s].step(x[s], y[s], [generators[1][s]], pace=torch.tensor(0.5))
        scores = stack.predict(x[0])
    stack.write_back()
    for s in range(2):
        one, other = stack.learners[s], alone[s].learners[0]
        assert_all_same(dict(one.named_buffers()), dict(other.named_buffers()))
        assert_all_same(dict(one.named_parameters()), dict(other.named_parameters()))
        assert_same(scores[s], other(x[0]).detach())
    one = learner(0)
    noise = one.draw(x[0])
    eager = updated(one, x[0], y[0], noise)
    fast = torch.compile(one.update, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        compiled = fast(one.params(), dict(one.named_buffers()), x[0], y[0], noise)
    assert_all_same(compiled.grads, eager.grads)
    assert_all_same(compiled.state, eager.state)
    torch._dynamo.reset()


# Options.


@pytest.mark.parametrize(
    ("rule", "options", "sentence"),
    [
        ("wp", {"sigma": 0}, "sigma is 0, but must be a positive number"),
        ("np", {"sigma": -0.1}, "sigma is -0.1, but must be a positive number"),
        ("wp", {"samples": 0}, "samples is 0, but must be a whole number"),
        ("np", {"samples": 1.5}, "samples is 1.5, but must be a whole number"),
        ("np", {"samples": True}, "samples is True, but must be a whole number"),
        ("wp", {"antithetic": 1}, "antithetic is 1, but must be True or False"),
        ("np", {"decorrelate": 1e-3}, "decorrelate is 0.001, but must be True or False"),
        ("np", {"decorrelation_rate": 0.0}, "decorrelation_rate is 0.0, but must be a positive number"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(rule: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ApicalError, match=sentence):
        apical.make(rule, mlp(), **options)


@pytest.mark.parametrize("rule", ["wp", "np"])
def test_noise_has_the_inputs_type_and_unit_spread_and_comes_from_the_generator(rule: str) -> None:
    model = nn.Sequential(nn.Linear(50, 40), nn.Tanh(), nn.Linear(40, 30))
    learner = apical.make(rule, model, samples=3)
    x = torch.randn(20, 50)
    one, two = (learner.draw(x, torch.Generator().manual_seed(3)) for _ in range(2))
    assert_all_same(one, two, tolerance=0.0)
    for e in one.values():
        assert e.dtype == x.dtype
        assert abs(float(e.std()) - 1) < 0.05
        assert abs(float(e.mean())) < 0.05


def test_the_models_own_weights_get_the_gradients() -> None:
    case = case_of("cnn")
    for rule in ("wp", "np"):
        grads = credited(apical.make(rule, case.model), case.x, case.labels)
        assert of_model(grads) == grads
        assert len(grads) == len(list(case.model.parameters()))
