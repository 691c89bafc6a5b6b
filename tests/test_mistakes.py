"""Natural mistakes are refused in a sentence that says what works, or warned of once; nothing passes in silence."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import apical
from apical import ApicalError
from cases import EVERY
from reference import assert_all_same, assert_same

X, Y = torch.randn(12, 4), torch.randint(0, 3, (12,))


def mlp(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), *more)


def list_warnings(function: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(w.message) for w in caught]


# Optimisers.


@pytest.mark.parametrize("rule", ["bp", "dll", "dtp", "local"])
def test_an_optimiser_without_any_parameter_of_the_learner_is_refused_at_the_first_step(rule: str) -> None:
    learner = apical.make(rule, mlp(), input_shape=(4,))
    before = {name: p.clone() for name, p in learner.named_parameters()}
    for other in (mlp().parameters(), apical.make(rule, mlp(), input_shape=(4,)).param_groups(0.1)):
        with pytest.raises(ApicalError, match="none of the parameters that this learner trains"):
            learner.step(X, Y, torch.optim.SGD(other, lr=0.1))
    assert_all_same(dict(learner.named_parameters()), before)
    assert all(p.grad is None for p in learner.parameters())


def test_an_optimiser_of_frozen_parameters_is_refused_and_one_of_a_part_or_of_more_is_not() -> None:
    model, more = mlp(), nn.Linear(2, 2)
    learner = apical.make("bp", model)
    model[0].requires_grad_(False)
    with pytest.raises(ApicalError, match="none of the parameters"):
        learner.step(X, Y, torch.optim.SGD(model[0].parameters(), lr=0.1))
    learner.step(X, Y, torch.optim.SGD(model[2].parameters(), lr=0.1))
    learner.step(X, Y, torch.optim.SGD([*model.parameters(), *more.parameters()], lr=0.1))


@pytest.mark.parametrize("wrong", ["adam", torch.optim.Adam, 0.1, mlp()])
def test_what_is_no_optimiser_is_refused(wrong: Any) -> None:
    with pytest.raises(ApicalError, match=r"must be a torch optimiser, such as torch.optim.Adam\(learner") as error:
        apical.make("dll", mlp()).step(X, Y, wrong)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("rule", "options"), [("dll", {}), ("dtp", {"inverse_rate": 0.5}), ("hebb", {"hidden_rate": 0.2})]
)
def test_a_scheduler_that_overwrites_a_rate_of_the_rules_own_is_warned_of_once(
    rule: str, options: dict[str, Any]
) -> None:
    learner = apical.make(rule, mlp(), **options)
    optim = torch.optim.SGD(learner.param_groups(0.1))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optim, 0.1, 9)

    def train() -> None:
        for _ in range(4):
            learner.step(X, Y, optim)
            scheduler.step()

    (said,) = list_warnings(train)
    assert "a scheduler has overwritten it" in said


@pytest.mark.parametrize("rule", ["bp", "dll", "dll:kolen-pollack"])
def test_schedulers_that_keep_the_shares_of_the_rates_are_not_warned_of(rule: str) -> None:
    for make_scheduler in (
        lambda optim: torch.optim.lr_scheduler.CosineAnnealingLR(optim, 3),
        lambda optim: torch.optim.lr_scheduler.LinearLR(optim, 0.1, 1.0, 3),
        lambda optim: torch.optim.lr_scheduler.OneCycleLR(optim, [g["lr"] for g in optim.param_groups], 9),
    ):
        learner = apical.make(rule, mlp())
        optim = torch.optim.SGD(learner.param_groups(0.1))
        scheduler = make_scheduler(optim)
        assert list_warnings(lambda: [(learner.step(X, Y, optim), scheduler.step()) for _ in range(4)]) == []  # noqa: B023


@pytest.mark.parametrize("lr", [-1, float("nan"), float("inf")])
def test_param_groups_refuse_what_is_no_rate(lr: float) -> None:
    for rule in ("bp", "dll", "dtp", "hebb", "rstdp", "local", "ff"):
        with pytest.raises(ApicalError, match="but must be a number of at least 0"):
            apical.make(rule, mlp(), input_shape=(4,)).param_groups(lr)
    with pytest.raises(ApicalError, match=r"lr is '0.1', but must be a number"):
        apical.make("bp", mlp()).param_groups("0.1")  # type: ignore[arg-type]


# GradScaler.


@pytest.mark.parametrize("rule", ["bp", "dll", "local", "ff"])
def test_a_scaler_multiplies_the_gradients_as_scaled_losses_do(rule: str) -> None:
    model, scaler = mlp().double(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    learner = apical.make(rule, model, input_shape=(4,))
    torch.manual_seed(1)
    learner.credit(X.double(), Y)
    plain = {name: p.grad.clone() for name, p in learner.named_parameters() if p.grad is not None}
    learner.zero_grad()
    torch.manual_seed(1)
    learner.credit(X.double(), Y, scaler=scaler)
    for name, gradient in plain.items():
        assert_same(learner.get_parameter(name).grad, 1024 * gradient)


def test_with_the_bp_rule_a_scaler_does_what_it_does_to_autograd() -> None:
    model, scaler = mlp().double(), torch.amp.GradScaler("cpu", init_scale=64.0)
    learner = apical.make("bp", model)
    learner.credit(X.double(), Y, scaler=scaler)
    ours = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    scaler.scale(nn.functional.cross_entropy(model(X.double()), Y)).backward()
    assert_all_same(ours, {name: p.grad for name, p in model.named_parameters()})


@pytest.mark.parametrize("rule", EVERY)
def test_a_scaled_step_is_the_step_without_a_scaler(rule: str) -> None:
    learners = [apical.make(rule, mlp().double(), input_shape=(4,)) for _ in range(2)]
    learners[1].load_state_dict(learners[0].state_dict())
    for learner, scaler in zip(learners, (None, torch.amp.GradScaler("cpu", init_scale=256.0)), strict=True):
        optim = torch.optim.SGD(learner.param_groups(0.01))
        torch.manual_seed(2)
        for _ in range(5):
            # a stream has no gradients in its first ticks, which a scaler refuses to step by
            learner.step(X.double(), Y, optim, scaler=None if rule.startswith("streaming") else scaler)
    assert_all_same(dict(learners[0].named_parameters()), dict(learners[1].named_parameters()))


def test_a_step_whose_gradients_overflow_is_left_out_and_the_scale_halves() -> None:
    learner, scaler = (
        apical.make("bp", nn.Sequential(nn.Linear(4, 3))),
        torch.amp.GradScaler("cpu", init_scale=2.0**127),
    )
    optim, before = torch.optim.SGD(learner.param_groups(0.1)), learner.model[0].weight.detach().clone()
    learner.step(1e3 * X, Y, optim, scaler=scaler)
    assert scaler.get_scale() == 2.0**126
    assert torch.equal(learner.model[0].weight, before)
    with pytest.raises(ApicalError, match=r"must be a torch.amp.GradScaler"):
        learner.credit(X, Y, scaler=1024.0)  # type: ignore[arg-type]


# Models.


@pytest.mark.parametrize("model", [mlp(nn.Softmax(1)), mlp(nn.Sequential(nn.Identity(), nn.Softmax(dim=-1)))])
def test_a_softmax_before_cross_entropy_is_warned_of_when_the_learner_is_made(model: nn.Sequential) -> None:
    (said,) = list_warnings(lambda: apical.make("dll", model).credit(X, Y))
    assert "is a Softmax, but cross_entropy takes the softmax of the scores itself" in said


def test_a_softmax_elsewhere_or_before_another_loss_is_not_warned_of() -> None:
    inside = nn.Sequential(nn.Linear(4, 5), nn.Softmax(1), nn.Linear(5, 3))
    assert list_warnings(lambda: apical.make("dll", inside)) == []
    assert list_warnings(lambda: apical.make("dll", mlp(nn.Softmax(1)), loss="mse")) == []
    own = {"loss": lambda output, y: nn.functional.nll_loss(output.log(), y, reduction="none")}
    assert list_warnings(lambda: apical.make("dll", mlp(nn.Softmax(1)), **own)) == []


class Own(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, a: Tensor) -> Tensor:
        return self.function(a)


def with_own(module: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), module, nn.Linear(5, 3))


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda a: a - a.mean(0),
    "roll": lambda a: a.roll(1, 0),
    "sum from above": lambda a: a.cumsum(0),
    "sum from below": lambda a: a.flip(0).cumsum(0).flip(0),
    "largest": lambda a: a / a.abs().max(),
}


@pytest.mark.parametrize("mixing", MIXING)
def test_a_module_of_ones_own_that_mixes_examples_is_warned_of_once(mixing: str) -> None:
    learner = apical.make("bp", with_own(Own(MIXING[mixing])))
    (said,) = list_warnings(lambda: [learner.credit(X, Y) for _ in range(3)])
    assert "module 1 (Own) mixes the examples of a batch" in said
    made = lambda: apical.make("bp", with_own(Own(MIXING[mixing])), input_shape=(4,))  # noqa: E731
    assert len(list_warnings(made)) == 1


def test_modules_that_keep_examples_apart_are_not_warned_of() -> None:
    for function in (
        lambda a: a - a.mean(1, keepdim=True),
        lambda a: a / a.norm(dim=1, keepdim=True),
        lambda a: a.nan_to_num().relu(),
    ):
        assert list_warnings(lambda: apical.make("bp", with_own(Own(function))).credit(X, Y)) == []  # noqa: B023
    assert list_warnings(lambda: apical.make("bp", with_own(nn.Softmax(1))).credit(X, Y)) == []
    assert len(list_warnings(lambda: apical.make("bp", with_own(nn.Softmax(0))).credit(X, Y))) == 1


def test_a_module_of_ones_own_that_draws_random_numbers_is_warned_of_once() -> None:
    """A rule takes all its random numbers as an argument, so that each pass over a batch has the same ones."""
    learner = apical.make("np", with_own(Own(lambda a: a * (torch.rand_like(a) < 0.5))))
    (said,) = list_warnings(lambda: [learner.credit(X, Y) for _ in range(3)])
    assert "module 1 (Own) draws random numbers itself" in said
    assert "nn.Dropout" in said


def test_the_checks_of_a_module_run_no_hook_and_draw_no_random_number() -> None:
    seen: list[Tensor] = []
    module = Own(lambda a: a * 2)
    module.register_forward_hook(lambda *args: seen.append(args[2]))
    learner = apical.make("bp", with_own(module))
    state = torch.get_rng_state()
    learner.credit(X, Y)
    assert [len(output) for output in seen] == [12]
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    "function",
    [
        lambda a: a if a.sum() > 0 else -a,
        lambda a: a * a.mean().item(),
        lambda a: a * float(a.max()),
        lambda a: a * len(a.nonzero()),
        lambda a: torch.from_numpy(a.detach().numpy()),
    ],
)
def test_control_flow_on_data_is_named(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(
        ApicalError, match=r"module 1 \(Own\(\)\) decides by the values of its input.*torch.where works"
    ):
        apical.make("pc", with_own(Own(function)), input_shape=(4,))


def test_shape_errors_describe_layers_as_torch_does() -> None:
    images = nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"), nn.Flatten(), nn.Linear(64, 2))
    for model, x in ((images, torch.randn(2, 1, 4, 4)), (images, torch.randn(2, 3, 5, 5))):
        with pytest.raises(ApicalError) as error:
            apical.make("pc", model).credit(x, torch.tensor([0, 1]))
        assert not any(word in str(error.value) for word in ("trailing", "Dense", "in_features", "Conv("))
    assert "Linear(64, 2)" in str(error.value)


# Rules.


class Idle(apical.Learner):
    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> apical.Update:
        output = self.network.predict(params, x, noise)
        return apical.Update({}, {}, self.loss(output, y).mean(), output)


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_rule_that_returns_no_gradients_is_refused(seeds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(apical.RULES, "idle", Idle)
    with pytest.raises(ApicalError, match="the rule returned no gradients"):
        apical.make("idle", mlp()).credit(X, Y)
    with pytest.raises(ApicalError, match="the rule returned no gradients"):
        apical.fit(mlp, (X, Y, X, Y), rule="idle", seeds=seeds, epochs=1, batch_size=4, progress=False)


def test_the_state_of_another_rule_is_refused_also_from_a_file(tmp_path: Any) -> None:
    fa, dll = apical.make("fa", mlp()), apical.make("dll", mlp())
    before = {name: value.clone() for name, value in dll.state_dict().items()}
    torch.save(fa.state_dict(), tmp_path / "fa.pt")
    for state in (fa.state_dict(), torch.load(tmp_path / "fa.pt")):
        with pytest.raises(ApicalError, match="the state is that of a 'fa' learner, and this one is 'dll'"):
            dll.load_state_dict(state)
    for name, value in dll.state_dict().items():
        assert torch.equal(value, before[name])
    apical.make("fa", mlp()).load_state_dict(fa.state_dict())
    apical.make("dll:frozen", mlp()).load_state_dict(dll.state_dict())
    dll.load_state_dict(dict(fa.state_dict()))  # plain tensors do not say where they are from


def test_a_name_in_capitals_is_met_with_a_hint() -> None:
    for name, meant in (("DLL", "dll"), ("BP", "bp"), ("DLL:Kolen-Pollack", "dll:kolen-pollack")):
        with pytest.raises(ApicalError, match=f"did you mean '{meant}'"):
            apical.make(name, mlp())


@pytest.mark.parametrize("wrong", [mlp(), torch.randn(5, 5), {"a": mlp()}])
def test_errors_are_one_line_whatever_was_passed(wrong: Any) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: apical.make(wrong, mlp()),
        lambda: apical.fit(mlp, (X, Y, X, Y), rule=wrong),
        lambda: apical.fit(mlp, (X, Y, X, Y), options=wrong, rule="bp", epochs=1),
        lambda: apical.fit(mlp, (X, Y, X, Y), seeds=wrong),
        lambda: apical.fit(mlp, (X, Y, X, Y), checkpoint=wrong),
        lambda: apical.make("dll", mlp(), theta_std=wrong),
        lambda: apical.make("dll", mlp()).step(X, Y, wrong),
    ]
    for call in calls:
        with pytest.raises(ApicalError) as error:
            call()
        assert "\n" not in str(error.value)


# Runs.


@pytest.mark.parametrize("build", [lambda n: mlp(), lambda *, width: mlp(), nn.Linear])
def test_a_function_that_takes_arguments_is_refused(build: Any) -> None:
    with pytest.raises(ApicalError, match=r"takes .*, but is called without arguments.*lambda: build\(...\) works"):
        apical.fit(build, (X, Y, X, Y), epochs=1)


def test_a_function_with_defaults_builds_the_model() -> None:
    run = apical.fit(lambda n=5, *a, **k: mlp(), (X, Y, X, Y), epochs=1, batch_size=4, progress=False)
    assert len(run.history) == 1


def test_a_batch_beyond_the_data_and_an_end_beyond_the_epochs_are_warned_of_once() -> None:
    def train(**options: Any) -> Callable[[], apical.Fit]:
        return lambda: apical.fit(mlp, (X, Y, X, Y), seeds=2, epochs=2, progress=False, **options)

    (said,) = list_warnings(train(batch_size=13))
    assert "batch_size=13 is more than the 12 training examples" in said
    (said,) = list_warnings(train(batch_size=12, stop_after=3))
    assert "stop_after=3 is beyond the 2 epochs" in said
    assert list_warnings(train(batch_size=12, stop_after=2)) == []


def test_seeds_of_one_run_are_warned_of_together() -> None:
    how: dict[str, Any] = {"seeds": 3, "epochs": 2, "batch_size": 4, "progress": False, "alignment": True}
    build = partial(mlp, nn.Softmax(1))
    assert len(list_warnings(lambda: apical.fit(build, (X, Y, X, Y), **how))) == 1
