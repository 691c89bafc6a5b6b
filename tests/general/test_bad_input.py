"""What goes wrong around a learner of any module: one sentence where torch does not say it better, and nothing is lost."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apical
from own_networks import ResNet, gradients_of, prepare
from reference import assert_all_same, assert_same


class Fields(nn.Module):
    """Two layers; `wrap` says what is returned."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.wrap = nn.Linear(4, 5), nn.Linear(5, 3), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.b(torch.tanh(self.a(x))))


def refused(call: Callable[[], object], *words: str) -> None:
    with pytest.raises(apical.ApicalError) as found:
        call()
    assert "\n" not in str(found.value)
    for word in words:
        assert word in str(found.value)


def images(count: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 1, 6, 6), torch.arange(count) % 3


def test_batches_that_nothing_can_learn_from_are_refused() -> None:
    learner = apical.make("dll", ResNet()).eval()
    x, y = images()
    before = copy.deepcopy(learner.state_dict())
    refused(lambda: learner.credit(x.numpy(), y), "ndarray", "Tensor")
    refused(lambda: learner.credit({"x": None}, y), "dict", "without tensors")
    refused(lambda: learner.credit(x, {"labels": y}), "dict", "Tensor")
    refused(lambda: learner.credit(x, None), "NoneType")
    refused(lambda: learner.credit(x.to("meta"), y), "meta")
    refused(lambda: learner.credit(x, y.to("meta")), "meta")
    refused(lambda: learner.credit(x[:0], y[:0]), "no examples")
    refused(lambda: learner.credit(x, y[:3]), "3 examples", "4")
    refused(lambda: learner.credit(x, y + 10), "labels")
    refused(lambda: learner.credit(x / 0, y), "loss")
    assert all(p.grad is None for p in learner.parameters())
    assert all(torch.equal(value, before[name]) for name, value in learner.state_dict().items())
    learner.credit(x, y)


@pytest.mark.parametrize("rule", ["fa", "bp"])
def test_an_example_that_the_model_cannot_take_is_one_sentence_whatever_it_raises(rule: str) -> None:
    for example in ("text", torch.randn(2, 3, 6, 6), torch.randn(2, 1, 6, 6).numpy(), {"images": torch.randn(2)}):
        model = ResNet()
        refused(lambda example=example, model=model: apical.make(rule, model, example=example), "example")
        assert type(model.fc) is nn.Linear


@pytest.mark.parametrize("rule", ["fa", "bp", "dll", "readout"])
def test_a_learner_cannot_be_made_in_inference_mode(rule: str) -> None:
    sequential, options = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), {"head": "fc"}
    with torch.inference_mode():
        refused(lambda: apical.make(rule, sequential), "inference_mode")
        refused(lambda: apical.make(rule, ResNet(), **(options if rule == "readout" else {})), "inference_mode")


def test_a_forward_pass_without_gradients_before_the_first_step_changes_nothing() -> None:
    own, model, _, x = prepare("resnet")
    y = torch.arange(len(x)) % 3
    learner = own.make("fa", model, x)
    twin = copy.deepcopy(learner)
    with torch.inference_mode():
        output = learner.eval()(x)
    with torch.no_grad():
        learner(x)
    with pytest.raises(RuntimeError, match="does not require grad"):
        F.cross_entropy(output, y).backward()
    found = gradients_of(learner.train(), lambda: F.cross_entropy(learner(x), y))
    assert_all_same(found, gradients_of(twin, lambda: F.cross_entropy(twin(x), y)))
    with torch.inference_mode():
        inputs = x.clone()
    with pytest.raises(RuntimeError, match=r"[Ii]nference tensors"):
        learner(inputs)
    assert_all_same(gradients_of(learner, lambda: F.cross_entropy(learner(x), y)), found)


def test_a_graph_that_is_retained_gives_the_same_gradients_again() -> None:
    x, y = images()
    learner = apical.make("dll", ResNet().double())
    loss = F.cross_entropy(learner(x.double()), y)
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in learner.named_parameters() if p.grad is not None}
    loss.backward()
    assert_all_same({name: p.grad / 2 for name, p in learner.named_parameters() if p.grad is not None}, once)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_part_that_was_frozen_when_the_learner_was_made_is_refused_by_name_when_it_thaws() -> None:
    model, (x, y) = ResNet(), images()
    model.stem.requires_grad_(False)
    model.bn.requires_grad_(False)
    learner = apical.make("fa", model, example=x)
    F.cross_entropy(learner(x), y).backward()
    assert model.stem.weight.grad is None
    model.requires_grad_(True)
    refused(lambda: learner(x), "model.blocks.0.conv1.weight", "make it anew")
    again = apical.make("fa", model, example=x)
    F.cross_entropy(again(x), y).backward()
    assert model.stem.weight.grad is not None


def test_fit_takes_a_model_with_several_outputs_if_a_field_is_named() -> None:
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    settings: dict[str, Any] = {"rule": "fa", "epochs": 1, "batch_size": 4, "progress": False}

    def build() -> nn.Module:
        return Fields(lambda scores: {"logits": scores, "sum": scores.sum()})

    refused(lambda: apical.fit(build, (x, y, x, y), **settings), "dict", "'logits'", "output")
    assert apical.fit(build, (x, y, x, y), options={"output": "logits"}, **settings).accuracy >= 0
    for output, word in (("lgts", "logits"), (0, "logits"), (1.5, "1.5")):
        options = {"options": {"output": output}}
        refused(lambda options=options: apical.fit(build, (x, y, x, y), **options, **settings), word)


@pytest.mark.parametrize("rule", ["dll:kolen-pollack", "dll"])
def test_a_grad_scaler_scales_and_unscales_what_the_rule_writes(rule: str) -> None:
    torch.manual_seed(0)
    model, (x, y) = ResNet().double(), images()
    x, learner = x.double(), apical.make(rule, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    optim = torch.optim.SGD(learner.param_groups(lr=0.1))
    expected = gradients_of(learner, lambda: F.cross_entropy(learner(x), y))
    learner.zero_grad()
    learner.credit(x, y, scaler=scaler)
    assert_all_same({n: p.grad / 64 for n, p in learner.named_parameters() if p.grad is not None}, expected)
    learner.zero_grad()
    learner.error_scale = len(x) / scaler.get_scale()
    scaler.scale(F.cross_entropy(learner(x), y)).backward()
    scaler.unscale_(optim)
    assert_all_same({n: p.grad for n, p in learner.named_parameters() if p.grad is not None}, expected)
    before = copy.deepcopy(dict(learner.named_parameters()))
    learner.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(F.cross_entropy(learner(x), y) * torch.inf).backward()
    scaler.step(optim)
    scaler.update()
    assert scaler.get_scale() == 32.0
    assert all(torch.equal(p, before[name]) for name, p in learner.named_parameters())


def test_an_average_of_learners_is_a_learner_of_its_own() -> None:
    torch.manual_seed(0)
    (x, y), learner = images(), apical.make("dll:kolen-pollack", ResNet())
    ema = torch.optim.swa_utils.AveragedModel(
        learner, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5), use_buffers=True
    )
    ema.update_parameters(learner)
    first = {name: p.detach().clone() for name, p in learner.named_parameters()}
    learner.step(x, y, torch.optim.SGD(learner.param_groups(lr=0.5)))
    ema.update_parameters(learner)
    for name, p in ema.module.named_parameters():
        assert_same(p.detach(), (first[name] + learner.get_parameter(name).detach()) / 2, tolerance=1e-5)
    assert any(name.startswith("feedback.") for name in first)
    expected = copy.deepcopy(ema.module)
    expected.zero_grad()
    expected.credit(x, y)
    before = copy.deepcopy(learner.state_dict())
    found = gradients_of(ema.module, lambda: F.cross_entropy(ema(x), y))
    assert_all_same(found, {n: p.grad for n, p in expected.named_parameters() if p.grad is not None}, tolerance=1e-4)
    assert all(torch.equal(value, before[name]) for name, value in learner.state_dict().items())


def test_theta_counts_in_the_norm_and_one_norm_for_all_keeps_it_the_mirror_of_w() -> None:
    torch.manual_seed(0)
    (x, y), learner = images(), apical.make("dll:kolen-pollack", ResNet().double())
    optim = torch.optim.SGD(learner.param_groups(lr=0.5))
    pairs = [(w, t) for w, t in zip(learner.forward_weights, learner.feedback_weights, strict=True) if t is not None]
    before = [(theta - w).detach() for w, theta in pairs]
    F.cross_entropy(learner(x.double()), y).backward()
    alone = nn.utils.get_total_norm([p.grad for p in learner.model.parameters()])
    theirs = nn.utils.get_total_norm([theta.grad for _, theta in pairs])
    whole = nn.utils.clip_grad_norm_(learner.parameters(), 1e-2)
    assert_same(whole, torch.hypot(alone, theirs))
    assert alone < whole <= math.sqrt(2) * alone
    optim.step()
    for (w, theta), difference in zip(pairs, before, strict=True):
        assert_same((theta - w).detach(), difference * (1 - 0.5 * learner.decay))


def test_schedulers_keep_the_ratio_of_the_rates_of_theta_and_w() -> None:
    learner = apical.make("dll", ResNet())
    optim = torch.optim.SGD(learner.param_groups(lr=0.1))
    rates = [group["lr"] for group in optim.param_groups]
    for scheduler in (
        torch.optim.lr_scheduler.LambdaLR(optim, lambda step: 1 / (1 + step)),
        torch.optim.lr_scheduler.OneCycleLR(optim, max_lr=rates, total_steps=5),
    ):
        for _ in range(3):
            optim.step()
            scheduler.step()
            ratio = {group["name"]: group["lr"] for group in optim.param_groups}
            assert math.isclose(ratio["theta"], learner.theta_rate * ratio["W"])


def test_a_trained_model_can_be_exported_without_gradients() -> None:
    x, _ = images()
    learner = apical.make("dll:kolen-pollack", ResNet())
    model = learner.model.eval()
    with torch.no_grad():
        exported = torch.export.export(model, (x,)).module()
        assert_same(exported(x), model(x), tolerance=1e-5)


@pytest.mark.parametrize("head", [{}, [1], 3, "nowhere"])
def test_a_head_that_is_no_module_is_refused(head: Any) -> None:
    with pytest.raises(apical.ApicalError, match="the model has no module"):
        apical.make("readout", nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), head=head)


@pytest.mark.parametrize("output", [{}, [1], 0.5, True])
def test_a_field_that_is_neither_a_name_nor_a_number_is_refused(output: Any) -> None:
    with pytest.raises(apical.ApicalError, match="must be the name or the number of a field"):
        apical.make("bp", nn.Sequential(nn.Linear(4, 2)), output=output)


@pytest.mark.parametrize("output", [0, "logits"])
def test_a_tensor_has_no_field(output: Any) -> None:
    """Its first example would be taken for it."""
    model = nn.Sequential(nn.Linear(4, 2))
    learner = apical.make("bp", model, output=output)
    with pytest.raises(apical.ApicalError, match=r"returns a tensor, which has no field .*; leave out output="):
        learner.credit(torch.randn(3, 4), torch.tensor([0, 1, 0]))
