"""What changes what a module computes is run and differentiated, or refused with a sentence at the next call."""

import types
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.flop_counter import FlopCounterMode

import apical
from reference import assert_all_same, autograd, credited, of_model
from sequences import sequences

X, Y = torch.randn(7, 2, 6, 6, dtype=torch.float64), torch.randint(0, 3, (7,))


class Square(nn.Tanh):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Doubling(nn.Module):
    """Writes into its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


def network(phi: nn.Module, between: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(1)
    between = nn.Identity() if between is None else between
    stages = [nn.Conv2d(2, 4, 3, padding=1), phi, between, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)]
    return nn.Sequential(*stages, nn.Tanh(), nn.Linear(5, 3)).double()


def assert_like_autograd(learner: apical.Learner, x: Tensor = X, y: Tensor = Y) -> None:
    expected = autograd(learner.model, F.cross_entropy(learner.model(x.clone()), y))
    assert_all_same(of_model(credited(learner, x, y)), expected)


def own_forward(module: nn.Module) -> None:
    plain = module.forward
    module.forward = lambda a: plain(a) * a.cos()  # type: ignore[method-assign]


def own_method(module: nn.Module) -> None:
    module.forward = types.MethodType(lambda self, a: a * a, module)  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "a hook": lambda m: m.register_forward_hook(lambda _m, _a, out: 1.7 * out + out.sin()),
    "a hook that changes its output": lambda m: m.register_forward_hook(lambda _m, _a, out: out.clone().mul_(1.7)),
    "a hook with keywords": lambda m: m.register_forward_hook(lambda _m, _a, _k, out: out / 2, with_kwargs=True),
    "a pre-hook": lambda m: m.register_forward_pre_hook(lambda _m, args: (1.3 * args[0] - 0.2,)),
    "a forward": own_forward,
    "a method": own_method,
}
MODULES: dict[str, Callable[[], nn.Module]] = {
    **{kind.__name__: kind for kind in (nn.Tanh, nn.ReLU, nn.Sigmoid, nn.GELU, nn.Identity)},
    "in place": lambda: nn.LeakyReLU(0.3, inplace=True),
    "random": lambda: nn.Dropout(0.0),
}


@pytest.mark.parametrize("before", [True, False], ids=["before make", "after make"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", MODULES)
def test_a_module_with_hooks_or_a_forward_of_its_own_has_autograds_gradient(
    kind: str, change: str, before: bool
) -> None:
    model = network(MODULES[kind]())
    if before and not (kind == "random" and "a hook" not in change):
        CHANGES[change](model[1])
    learner = apical.make("bp", model)
    credited(learner, X, Y)
    CHANGES[change](model[1])
    if kind == "random" and change in ("a forward", "a method"):
        with pytest.raises(apical.ApicalError, match=r"1 \(Dropout\) has a forward of its own"):
            learner.credit(X, Y)
    else:
        assert_like_autograd(learner)


@pytest.mark.parametrize("at", [1, 3], ids=["the activation", "the pooling"])
def test_a_hook_sees_the_users_own_module_in_the_users_order_and_real_values(at: int) -> None:
    model, seen = network(nn.ReLU(inplace=True)), []
    model[at].register_forward_hook(lambda m, args, out: seen.append((m, args[0].shape, out.is_meta)))
    apical.make("bp", model, input_shape=(2, 6, 6)).credit(X, Y)
    assert seen == [(model[at], (7, 4, 6, 6), False)]


def test_a_module_that_writes_into_its_input_spoils_no_derivative() -> None:
    """Tanh's derivative needs its output, so autograd itself takes the network only if the module writes elsewhere."""
    careful = network(nn.Tanh(), Twice())
    expected = autograd(careful, F.cross_entropy(careful(X), Y))
    assert_all_same(of_model(credited(apical.make("bp", network(nn.Tanh(), Doubling())), X, Y)), expected)


def test_a_patched_class_computes_what_it_was_patched_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, a: a * a)
    assert_like_autograd(apical.make("bp", network(nn.ReLU())))


@pytest.mark.parametrize("inplace", [True, False])
def test_a_module_follows_later_changes_of_its_attributes(inplace: bool) -> None:
    model = network(nn.LeakyReLU(0.01, inplace=inplace))
    learner = apical.make("bp", model)
    credited(learner, X, Y)
    model[1].negative_slope = 0.7
    assert_like_autograd(learner)


def test_shapes_follow_a_pooling_that_changes() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.MaxPool2d(2), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    learner = apical.make("bp", model.append(nn.Linear(4, 3)).double())
    learner.credit(X, Y)
    model[1].kernel_size = model[1].stride = 4
    assert learner.credit(X, Y).output.shape == (7, 3)
    assert learner.draw(X)["2"].shape == (7, 4, 1, 1)


def test_seeds_with_hooks_train_as_autograd_and_sgd_would() -> None:
    x, y = torch.randn(12, 5), torch.randint(0, 3, (12,))

    def build() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
        scale = float(torch.rand(()))  # each seed has its own
        model[1].register_forward_hook(lambda _m, _a, out: (1 + scale) * out)
        return model

    run = apical.fit(
        build, (x, y, x, y), rule="bp", epochs=1, lr=0.5, optimizer="sgd", seeds=3, stack=True, progress=False
    )
    for seed, learner in enumerate(run.learners):
        torch.manual_seed(seed)
        model = build()
        optim = torch.optim.SGD(model.parameters(), lr=0.5)
        F.cross_entropy(model(x), y).backward()
        optim.step()
        for p, expected in zip(learner.model.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p, expected)


def test_seeds_whose_modules_differ_are_not_stacked() -> None:
    x, y = torch.randn(12, 5), torch.randint(0, 3, (12,))

    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(5, 6), nn.LeakyReLU(float(torch.rand(()))), nn.Linear(6, 3))

    stacked, alone = (
        apical.fit(build, (x, y, x, y), rule="bp", epochs=2, seeds=3, stack=stack, progress=False)
        for stack in (True, False)
    )
    for one, other in zip(stacked.learners, alone.learners, strict=True):
        assert_all_same(dict(one.named_parameters()), dict(other.named_parameters()), 1e-6)


# What is refused.

REFUSED: dict[str, tuple[Callable[[nn.Sequential], object], str]] = {
    "a hook on weights": (lambda m: m[0].register_forward_hook(lambda *_: None), r"0 \(Conv2d\) has forward hooks"),
    "a pre-hook on weights": (
        lambda m: m[5].register_forward_pre_hook(lambda *_: None),
        r"5 \(Linear\) has forward hooks",
    ),
    "a hook on the model": (
        lambda m: m.register_forward_hook(lambda *_: None),
        r"the model \(Sequential\) has forward",
    ),
    "a forward of weights": (lambda m: own_forward(m[5]), r"5 \(Linear\) has a forward of its own"),
    "a forward of the model": (lambda m: own_forward(m), "has a forward of its own"),
    "a backward hook": (lambda m: m[1].register_full_backward_hook(lambda *_: None), r"1 \(Tanh\) has backward hooks"),
    "a backward pre-hook": (lambda m: m[1].register_full_backward_pre_hook(lambda *_: None), "has backward hooks"),
    "a hook on a gradient": (lambda m: m[5].weight.register_hook(lambda g: 2 * g), "has backward hooks"),
    "a hook after a gradient": (lambda m: m[5].bias.register_post_accumulate_grad_hook(print), "has backward hooks"),
}
CHANGED: dict[str, Callable[[nn.Sequential], object]] = {
    "another class": lambda m: setattr(m[1], "__class__", Square),
    "no bias": lambda m: setattr(m[5], "bias", None),
    "a deleted bias": lambda m: delattr(m[5], "bias"),
    "other weights": lambda m: setattr(m[7], "weight", nn.Parameter(torch.randn(3, 4))),
    "a stride": lambda m: setattr(m[0], "stride", (2, 2)),
    "a padding mode": lambda m: setattr(m[0], "padding_mode", "circular"),
}


def attempts(learner: apical.Learner, optim: torch.optim.Optimizer) -> list[Callable[[], object]]:
    def fit() -> object:
        return apical.fit(learner, (X, Y, X, Y), epochs=1, progress=False)

    return [lambda: learner.credit(X, Y), lambda: learner.step(X, Y, optim), fit, lambda: learner.param_groups(0.1)]


@pytest.mark.parametrize("what", REFUSED)
def test_hooks_that_would_not_run_are_refused_whenever_they_are_added(what: str) -> None:
    add, words = REFUSED[what]
    model = network(nn.Tanh())
    learner = apical.make("bp", model)
    optim = torch.optim.SGD(learner.param_groups(0.1), lr=0.1)
    add(model)
    for attempt in [*attempts(learner, optim), lambda: apical.make("dll", model)]:
        with pytest.raises(apical.ApicalError, match=words):
            attempt()


@pytest.mark.parametrize("what", CHANGED)
def test_a_layer_that_changed_after_make_is_refused(what: str) -> None:
    model = network(nn.Tanh())
    learner = apical.make("bp", model)
    optim = torch.optim.SGD(learner.param_groups(0.1), lr=0.1)
    CHANGED[what](model)
    for attempt in attempts(learner, optim):
        with pytest.raises(apical.ApicalError, match="changed after the learner was created; create a new learner"):
            attempt()


def test_layers_that_come_to_share_their_weights_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    learner, x, y = apical.make("bp", model), torch.randn(3, 4), torch.tensor([0, 1, 2])
    model[2].weight = model[0].weight
    with pytest.raises(apical.ApicalError, match=r"2 \(Linear\) changed after the learner was created"):
        learner.credit(x, y)


@pytest.mark.parametrize("change", ["rnn", "readout", "model", "mode"])
def test_an_elman_that_changed_after_make_is_refused(change: str) -> None:
    case = sequences()
    learner = apical.make("bp", case.model)
    learner.credit(case.x, case.labels)
    if change == "mode":
        case.model.rnn.mode = "RNN_RELU"
    else:
        (case.model if change == "model" else getattr(case.model, change)).register_forward_hook(lambda *_: None)
    with pytest.raises(apical.ApicalError, match=r"has forward hooks|changed after the learner was created"):
        learner.credit(case.x, case.labels)


@pytest.mark.parametrize("rule", ["ep", "rstdp"])
def test_rules_that_run_something_else_in_place_of_a_module_refuse_its_hooks(rule: str) -> None:
    model = network(nn.ReLU()).float()
    learner = apical.make(rule, model, input_shape=(2, 6, 6))
    learner.credit(X.float().abs(), Y)
    model[3].register_forward_hook(lambda _m, _a, out: 2 * out)
    for attempt in (lambda: learner.credit(X.float(), Y), lambda: learner(X.float())):
        with pytest.raises(apical.ApicalError, match=r"3 \(MaxPool2d\) has forward hooks"):
            attempt()


@pytest.mark.parametrize(
    "register",
    [
        lambda: torch_module.register_module_forward_hook(lambda _m, _a, out: 2 * out),
        lambda: torch_module.register_module_forward_pre_hook(lambda _m, args: (2 * args[0],)),
        lambda: torch_module.register_module_full_backward_hook(lambda *_: None),
    ],
    ids=["forward", "pre", "backward"],
)
def test_global_hooks_are_refused_while_they_are_there(
    register: Callable[[], torch.utils.hooks.RemovableHandle],
) -> None:
    learner = apical.make("bp", network(nn.Tanh()))
    with register(), pytest.raises(apical.ApicalError, match="global module hooks"):
        learner.credit(X, Y)
    assert_like_autograd(learner)


def test_torchs_own_flop_counter_may_watch() -> None:
    learner = apical.make("bp", network(nn.Tanh()))
    plain = credited(learner, X, Y)
    learner.zero_grad()
    with FlopCounterMode(display=False) as counter:
        watched = credited(learner, X, Y)
    assert counter.get_total_flops() > 0
    assert_all_same(watched, plain)
