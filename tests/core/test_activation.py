"""φ: its derivative, in-place activations, and modules that draw random numbers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import apical
from apical.core.activation import Neuron
from cases import RULES, learner_for
from reference import assert_all_same, assert_same, autograd, cross_entropy, feedback_pass
from strategies import ACTIVATIONS, Case, activations, networks

RANDOM = [
    nn.Dropout(0.3),
    nn.Dropout(0.3, inplace=True),
    nn.Dropout1d(0.3),
    nn.Dropout2d(0.3),
    nn.Dropout2d(0.3, inplace=True),
    nn.AlphaDropout(0.3),
    nn.AlphaDropout(0.3, inplace=True),
    nn.FeatureAlphaDropout(0.3),
    nn.RReLU(),
    nn.RReLU(0.1, 0.6, inplace=True),
]
by_random = pytest.mark.parametrize("module", RANDOM, ids=str)


def neuron_of(*modules: nn.Module) -> Neuron:
    return Neuron([(str(i), module) for i, module in enumerate(modules)])


def shape_for(module: nn.Module) -> tuple[int, ...]:
    """A shape that the module takes: a channel dimension and as many positions as its name says."""
    return (6, 50, 4, 3) if "2d" in type(module).__name__ or "Feature" in type(module).__name__ else (6, 50, 9)


def a_network(module: nn.Module) -> Case:
    """A network with the random module in its prefix, after a convolution, and before the end."""
    torch.manual_seed(2)
    module, twin = copy.deepcopy(module), copy.deepcopy(module)
    if "2d" in type(module).__name__ or "Feature" in type(module).__name__:
        model = nn.Sequential(twin, nn.Conv2d(3, 5, 3), module, nn.Flatten(), nn.Linear(20, 4))
        x = torch.randn(7, 3, 4, 4, dtype=torch.float64)
    else:
        model = nn.Sequential(twin, nn.Conv1d(3, 5, 3), module, nn.Flatten(), nn.Linear(20, 4))
        x = torch.randn(7, 3, 6, dtype=torch.float64)
    return Case(model.double(), x, torch.randint(0, 4, (7,)))


# The derivative.


@given(activation=activations(), seed=st.integers(0, 99))
def test_the_pullback_of_phi_equals_autograd(activation: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    a = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    stages = [activation, nn.MaxPool1d(2), nn.Flatten()]
    u = nn.Sequential(*stages)(a.clone())
    e = torch.randn_like(u)
    (expected,) = torch.autograd.grad(u, a, e)
    got, pullback = neuron_of(*stages).vjp(a.detach(), {})
    assert_same(got, u.detach())
    assert_same(pullback(e), expected)


@pytest.mark.parametrize("pooling", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, padding=1, dilation=2, ceil_mode=True)])
@pytest.mark.parametrize("activation", [nn.Tanh(), nn.Sigmoid(), nn.ReLU(), nn.GELU()])
def test_max_pooling_may_run_before_an_activation_and_gives_the_same_numbers(
    activation: nn.Module, pooling: nn.Module
) -> None:
    """Bit by bit forwards; where tanh is 1 at several places its derivative is 0, whichever of them is taken."""
    torch.manual_seed(0)
    a = (12 * torch.randn(4, 3, 9, 9)).requires_grad_()
    stages = [activation, nn.Identity(), activation, pooling]
    u = nn.Sequential(*stages)(a)
    e = torch.randn_like(u)
    (expected,) = torch.autograd.grad(u, a, e)
    neuron = neuron_of(*stages)
    got, pullback = neuron.vjp(a.detach(), {})
    assert torch.equal(got, u)
    assert torch.equal(neuron(a.detach(), {}), u)
    assert_same(pullback(e), expected)


def test_an_activation_that_rises_runs_on_what_max_pooling_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, pool = [], F.max_pool2d
    monkeypatch.setattr(F, "max_pool2d", lambda a, *args, **options: seen.append(a) or pool(a, *args, **options))
    a = torch.randn(2, 3, 4, 4)
    for before, waits in (([nn.ReLU(), nn.Tanh()], True), ([nn.GELU()], False), ([nn.Tanh(), nn.Dropout()], False)):
        neuron_of(*before, nn.MaxPool2d(2))(a, {})
        assert torch.equal(seen.pop(), a) == waits


def test_without_stages_phi_is_the_identity() -> None:
    a, e = torch.randn(3, 4), torch.randn(3, 4)
    u, pullback = neuron_of().vjp(a, {})
    assert torch.equal(u, a)
    assert torch.equal(pullback(e), e)


# In place.


@pytest.mark.parametrize("rule", RULES)
def test_in_place_activations_corrupt_neither_input_nor_gradient(rule: str) -> None:
    def build(inplace: bool) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.ReLU(inplace=inplace),  # acts on the user's own batch
            nn.Linear(4, 5),
            nn.ELU(inplace=inplace),
            nn.Linear(5, 5),
            nn.SiLU(inplace=inplace),
            nn.Hardtanh(-0.2, 0.2, inplace=inplace),
            nn.Linear(5, 3),
            nn.LeakyReLU(inplace=inplace),
        ).double()

    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    before = x.clone()
    results = []
    for inplace in (False, True):
        model = build(inplace)
        torch.manual_seed(1)
        learner = apical.make(rule, model)
        learner.credit(x, y)
        assert torch.equal(x, before)
        results.append({n: p.grad for n, p in learner.named_parameters() if p.grad is not None})
    assert_all_same(results[1], results[0])


def test_the_users_in_place_modules_stay_in_place() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3))
    learner = apical.make("bp", model)
    learner.credit(torch.randn(6, 4), torch.randint(0, 3, (6,)))
    assert model[1].inplace is True


# Random modules.


@by_random
def test_in_eval_mode_a_random_module_is_what_torch_makes_of_it(module: nn.Module) -> None:
    case = a_network(module)
    learner = learner_for("bp", case).eval()
    assert learner.draw(case.x) == {}
    output = case.model(case.x.clone())
    loss = F.cross_entropy(output, case.labels)
    assert_same(learner.credit(case.x, case.labels).output, output)
    grads = {n: p.grad for n, p in learner.named_parameters()}
    assert_all_same(grads, autograd(case.model, F.cross_entropy(case.model(case.x.clone()), case.labels)))
    assert_same(learner.credit(case.x, case.labels).loss, loss)


@by_random
def test_train_and_eval_can_change_at_any_time(module: nn.Module) -> None:
    case = a_network(module)
    case.model.eval()
    learner = learner_for("bp", case)
    still = learner.credit(case.x, case.labels).output
    learner.train()
    assert set(learner.draw(case.x)) == {"0", "2"}
    assert not torch.allclose(learner.credit(case.x, case.labels).output, still)
    learner.eval()
    assert_same(learner.credit(case.x, case.labels).output, still)
    case.model[2].train()  # one module alone, as people do for Monte Carlo dropout
    assert set(learner.draw(case.x)) == {"2"}


@by_random
def test_two_draws_differ_and_one_generator_repeats_them(module: nn.Module) -> None:
    case = a_network(module)
    learner = learner_for("bp", case)
    one, two, again = (learner.draw(case.x, torch.Generator().manual_seed(s)) for s in (1, 2, 1))
    for name, noise in one.items():
        assert torch.equal(noise, again[name])
        assert not torch.equal(noise, two[name])
        assert noise.dtype == case.x.dtype
        assert bool(((noise >= 0) & (noise < 1)).all())


@by_random
@pytest.mark.parametrize("rule", ["bp", "fa", "dll"])
def test_with_the_same_noise_the_gradient_is_autograds_through_the_same_masks(rule: str, module: nn.Module) -> None:
    """The masks are read off the network's own forward pass, so that no convention about the noise is assumed."""
    case = a_network(module)
    learner = learner_for(rule, case)
    params = dict(learner.named_parameters())
    noise = learner.draw(case.x)
    with torch.no_grad():
        update = learner.update(params, {}, case.x, case.labels, noise)

    class Fixed(nn.Module):
        """What the stage did to each value, as the affine map a ↦ scale·a + shift for values of a's sign."""

        def __init__(self, name: str, stage: nn.Module) -> None:
            super().__init__()
            self.neuron, self.noise = Neuron([(name, stage)]), {name: noise[name]}

        def forward(self, a: Tensor) -> Tensor:
            def at(value: Tensor) -> Tensor:
                return self.neuron(value, self.noise).detach()

            near = a.detach().sign()
            far = 2 * near
            scale = (at(far) - at(near)) / near
            return scale * a + (at(near) - scale * near)

    fixed = nn.Sequential(
        Fixed("0", case.model[0]), case.model[1], Fixed("2", case.model[2]), case.model[3], case.model[4]
    )
    feedback = learner.feedback_weights
    expected = feedback_pass(fixed, case.x, case.labels, cross_entropy(), feedback)
    assert_same(update.output, fixed(case.x))
    for name, value in expected.grads.items():
        assert_same(update.grads[name], value, what=name)


@pytest.mark.parametrize("p", [0.0, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_keeps_one_minus_p_and_scales_what_it_keeps(p: float, inplace: bool) -> None:
    neuron = neuron_of(nn.Dropout(p, inplace=inplace))
    a = torch.randn(200, 500, dtype=torch.float64)
    out = neuron(a, {"0": torch.rand_like(a)})
    kept = out != 0
    assert abs(float(kept.double().mean()) - (1 - p)) < 0.01
    if p < 1:
        assert_same(out[kept], a[kept] / (1 - p))
    assert bool(out.isfinite().all())


@pytest.mark.parametrize(
    ("module", "shape"),
    [(nn.Dropout1d(0.4), (200, 50, 6)), (nn.Dropout2d(0.4), (200, 50, 3, 2)), (nn.Dropout3d(0.4), (200, 50, 3, 2, 2))],
    ids=str,
)
def test_channel_dropout_keeps_or_drops_whole_channels(module: nn.Module, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(module, nn.Flatten(), nn.Linear(torch.Size(shape[1:]).numel(), 2))
    learner = apical.make("bp", model)
    x = torch.rand(shape) + 1
    out = learner.network.prefix.stages[0]
    noise = learner.draw(x)[out.name]
    dropped = neuron_of(module)(x, {"0": noise})
    share = (dropped != 0).flatten(2).double().mean(2)  # of each channel of each example
    assert bool(((share == 0) | (share == 1)).all())
    assert abs(float(share.mean()) - 0.6) < 0.02
    kept = dropped != 0
    assert_same(dropped[kept], x[kept] / 0.6)


@pytest.mark.filterwarnings("ignore:dropout")
@pytest.mark.parametrize("rank", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", [nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout])
def test_channel_dropout_drops_along_the_axes_along_which_torch_does(kind: type[nn.Module], rank: int) -> None:
    """An input of a rank that torch takes for one unbatched example loses whole examples. What torch refuses is refused."""
    x = torch.rand(30, *(6, 5, 4, 3)[: rank - 1]) + 1
    size = x[0].numel()
    model = nn.Sequential(kind(0.5), nn.Flatten(), nn.Linear(size, size, bias=False))
    nn.init.eye_(model[2].weight)
    learner = apical.make("bp", model)

    def constant_axes(out: Tensor) -> list[bool]:
        dropped = (out == out.amin()) if kind is nn.FeatureAlphaDropout else (out == 0)
        return [bool((dropped == dropped.narrow(axis, 0, 1)).all()) for axis in range(rank)]

    try:
        expected = constant_axes(model[0](x))
    except RuntimeError:
        with pytest.raises(apical.ApicalError, match="Expected 2D or 3D input"):
            learner.credit(x, torch.zeros(30).long())
    else:
        assert constant_axes(learner.credit(x, torch.zeros(30).long()).output.view_as(x)) == expected


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("kind", [nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_alpha_dropout_keeps_mean_and_variance_and_sets_the_rest_to_selus_floor(
    p: float, kind: type[nn.Module]
) -> None:
    """Klambauer et al. 2017: dropped units sit at −λα, and the affine map restores mean 0 and variance 1."""
    shape = (3000, 100) if kind is nn.AlphaDropout else (3000, 100, 2)
    a = torch.randn(shape, dtype=torch.float64)
    noise = torch.rand(shape[0], shape[1], *[1] * (len(shape) - 2), dtype=torch.float64)
    out = neuron_of(kind(p))(a, {"0": noise})
    assert abs(float(out.mean())) < 0.02
    assert abs(float(out.var()) - 1) < 0.03
    floor = -1.0507009873554805 * 1.6732632423543772
    scale = ((1 - p) * (1 + p * floor**2)) ** -0.5
    low = scale * (floor - floor * p)
    dropped = (out - low).abs() < 1e-9
    assert abs(float(dropped.double().mean()) - p) < 0.01
    assert_same(out[~dropped], scale * (a[~dropped] - floor * p))


def test_alpha_dropout_of_everything_is_zero_as_in_torch() -> None:
    a = torch.randn(5, 4)
    out = neuron_of(nn.AlphaDropout(1.0))(a, {"0": torch.rand(5, 4)})
    assert not out.any()
    assert not nn.AlphaDropout(1.0)(a).any()


def test_rrelu_leaves_positive_values_and_draws_slopes_evenly_between_its_bounds() -> None:
    a = torch.randn(400, 500, dtype=torch.float64)
    out = neuron_of(nn.RReLU(0.2, 0.6))(a, {"0": torch.rand_like(a)})
    assert torch.equal(out[a >= 0], a[a >= 0])
    slopes = (out / a)[a < 0]
    assert float(slopes.min()) >= 0.2
    assert float(slopes.max()) <= 0.6
    assert abs(float(slopes.mean()) - 0.4) < 0.005
    assert abs(float(slopes.var()) - 0.4**2 / 12) < 0.0005


def test_credit_draws_new_noise_each_time_and_repeats_with_torchs_seed() -> None:
    case = a_network(nn.Dropout(0.5))
    learner = learner_for("bp", case)

    def output(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return learner.credit(case.x, case.labels).output

    assert torch.equal(output(1), output(1))
    assert not torch.equal(output(1), learner.credit(case.x, case.labels).output)


@given(case=networks())
def test_a_network_without_random_modules_draws_nothing(case: Case) -> None:
    assert learner_for("bp", case).draw(case.x) == {}


PHI = [
    nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
    nn.MaxPool2d(2, dilation=2),
    nn.LPPool2d(2, 2),
    nn.Upsample(scale_factor=2),
    nn.Upsample(scale_factor=1.5, mode="bilinear"),
    nn.PixelShuffle(2),
    nn.PixelUnshuffle(2),
    nn.ZeroPad2d((0, 1, 2, 0)),
    nn.ReflectionPad2d(1),
    nn.CircularPad2d(1),
    nn.LocalResponseNorm(2),
    nn.GroupNorm(2, 4, affine=False),
    nn.LayerNorm((4, 6, 6), elementwise_affine=False),
    nn.GLU(1),
    nn.Softmax2d(),
    nn.Unfold(2),
    nn.Unflatten(1, (2, 2)),
    *[build() for build in ACTIVATIONS],
]


@pytest.mark.parametrize("module", PHI, ids=str)
def test_any_module_without_parameters_can_be_phi(module: nn.Module) -> None:
    """Between two layers of weights, every one of torch's that keeps the batch: bp is still autograd."""
    first = nn.Conv2d(2, 4, 1)
    x, y = torch.randn(5, 2, 6, 6, dtype=torch.float64), torch.randint(0, 3, (5,))
    width = module(first(x.float()).detach()).flatten(1).shape[1]
    model = nn.Sequential(first, module, nn.Flatten(), nn.Linear(width, 3)).double()
    learner = apical.make("bp", model)
    learner.credit(x, y)
    grads = {n: p.grad for n, p in learner.named_parameters()}
    assert_all_same(grads, autograd(model, F.cross_entropy(model(x), y)))
