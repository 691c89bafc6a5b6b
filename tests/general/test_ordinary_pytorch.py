"""A learner of any module in an ordinary PyTorch loop: backward() is the rule, whatever PyTorch does around it."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import apical
from own_networks import FAMILY, LINEAR, STORED, ResNet, gradients_of, prepare, run
from reference import assert_all_same, assert_same

EVERY = [*FAMILY, "readout"]


def build(rule: str, name: str = "gpt") -> tuple[Any, nn.Module, Any]:
    own, model, _, x = prepare(name)
    head = {"head": "head" if name == "gpt" else "fc"} if rule == "readout" else {}
    return own.make(rule, model, x, **head), model, x


def targets(output: Tensor) -> Tensor:
    return torch.arange(output[..., 0].numel()).reshape(output.shape[:-1]) % output.shape[-1]


def loss_of(call: Callable[[Any], Tensor], x: Any) -> Tensor:
    torch.manual_seed(3)
    output = call(x)
    return F.cross_entropy(output.flatten(0, -2), targets(output).flatten())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("rule", EVERY)
def test_a_checkpointed_model_learns_as_one_that_is_not(rule: str, reentrant: bool) -> None:
    learner, model, x = build(rule)
    expected = gradients_of(learner, lambda: loss_of(learner, x))
    model.reentrant = reentrant
    for call in (learner, model):
        assert_all_same(gradients_of(learner, lambda call=call: loss_of(call, x)), expected)
    learner.error_scale = x.numel()
    expected = gradients_of(learner, lambda: loss_of(learner, x))
    y = targets(learner(x).detach())
    learner.zero_grad()
    torch.manual_seed(3)
    learner.credit(x, y)
    assert_all_same({n: p.grad for n, p in learner.named_parameters() if p.grad is not None}, expected)
    again, other, _ = build(rule)
    other.reentrant = reentrant
    made = apical.make(rule, other, example=x, **({"head": "head"} if rule == "readout" else {}))
    assert [theta is None for theta in made.feedback_weights] == [theta is None for theta in again.feedback_weights]


@pytest.mark.parametrize("rule", EVERY)
def test_credit_and_step_are_the_same_rule_as_backward(rule: str) -> None:
    learner, _, x = build(rule)
    learner.error_scale = x.numel()  # the loss averages over tokens
    expected = gradients_of(learner, lambda: loss_of(learner, x))
    with torch.no_grad():
        output = learner(x)
    learner.zero_grad()
    torch.manual_seed(3)
    credit = learner.credit(x, targets(output))
    assert_same(credit.loss, loss_of(learner, x).detach())
    assert_all_same({n: p.grad for n, p in learner.named_parameters() if p.grad is not None}, expected)
    optim = torch.optim.SGD(learner.param_groups(lr=0.1))
    before = {n: p.detach().clone() for n, p in learner.named_parameters()}
    torch.manual_seed(3)
    learner.step(x, targets(output), optim)
    groups = {id(p): group for group in optim.param_groups for p in group["params"]}
    for name, p in learner.named_parameters():
        if name in expected:
            group = groups[id(p)]
            decayed = expected[name] + group["weight_decay"] * before[name]
            assert_same(p.detach(), before[name] - group["lr"] * decayed)
        else:
            assert torch.equal(p, before[name])


@pytest.mark.parametrize("rule", [*LINEAR, "readout"])
def test_accumulated_micro_batches_equal_one_batch(rule: str) -> None:
    learner, _, x = build(rule)
    learner.eval()
    expected = gradients_of(learner, lambda: loss_of(learner, x))
    with torch.no_grad():
        y = targets(learner(x))
    learner.zero_grad()
    for part in (slice(0, 2), slice(2, 4)):
        output = learner(x[part])
        (F.cross_entropy(output.flatten(0, -2), y[part].flatten()) / 2).backward()
    assert_all_same({n: p.grad for n, p in learner.named_parameters() if p.grad is not None}, expected)


@pytest.mark.parametrize("rule", ["dll", "dll:released"])
def test_accumulation_and_scaling_are_a_matter_of_the_error_scale(rule: str) -> None:
    learner, _, x = build(rule)
    learner.eval()
    learner.error_scale = x.numel()
    expected = gradients_of(learner, lambda: loss_of(learner, x))
    learner.error_scale = x.numel() / 8.0
    scaled = gradients_of(learner, lambda: 8.0 * loss_of(learner, x))
    assert_all_same({name: g / 8.0 for name, g in scaled.items()}, expected)
    learner.error_scale = 1
    output = learner(x)
    learner.zero_grad()
    F.cross_entropy(output.flatten(0, -2), targets(output).flatten(), reduction="sum").backward()
    assert_all_same({n: p.grad / x.numel() for n, p in learner.named_parameters() if p.grad is not None}, expected)


@pytest.mark.parametrize("rule", EVERY)
def test_copies_and_saved_states_learn_alike(rule: str) -> None:
    learner, model, x = build(rule)
    expected = gradients_of(learner, lambda: loss_of(learner, x))
    for twin in (copy.deepcopy(learner), pickle.loads(pickle.dumps(learner))):
        assert not {id(p) for p in twin.parameters()} & {id(p) for p in learner.parameters()}
        assert_all_same(gradients_of(twin, lambda twin=twin: loss_of(twin, x)), expected)
        assert_all_same(gradients_of(twin, lambda twin=twin: loss_of(twin.model, x)), expected)
    other, _, _ = build(rule)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1.0)
    other.load_state_dict(learner.state_dict())
    assert_all_same(gradients_of(other, lambda: loss_of(other, x)), expected)
    assert list(model.state_dict()) == list(prepare("gpt")[1].state_dict())
    assert type(model).__name__ == "GPT"
    assert isinstance(model.head, nn.Linear)


@pytest.mark.parametrize("rule", STORED)
def test_functional_call_reaches_weights_and_feedback_weights(rule: str) -> None:
    learner, _, x = build(rule)
    values = {name: (2 * p).detach().requires_grad_(p.requires_grad) for name, p in learner.named_parameters()}
    loss_of(lambda x: functional_call(learner, values, (x,)), x).backward()
    found = {name: v.grad for name, v in values.items() if v.grad is not None}
    with torch.no_grad():
        for p in {id(p): p for p in learner.parameters()}.values():
            p.mul_(2)
    assert_all_same(found, gradients_of(learner, lambda: loss_of(learner, x)))


@pytest.mark.parametrize("rule", EVERY)
def test_under_autocast_products_run_in_its_type_and_gradients_keep_theirs(rule: str) -> None:
    learner, model, x = build(rule)
    learner.float().eval()
    expected = gradients_of(learner, lambda: loss_of(learner, x))
    seen: list[torch.dtype] = []
    model.blocks[0].up.register_forward_hook(lambda _m, _a, out: seen.append(out.dtype))

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output = learner(x)
        return F.cross_entropy(output.float().flatten(0, -2), targets(output).flatten())

    grads = gradients_of(learner, loss)
    assert seen == [torch.bfloat16]
    assert all(g.dtype == torch.float32 for g in grads.values())
    for name, g in grads.items():
        assert_same(g, expected[name], tolerance=0.1)


def test_ema_clipping_and_schedulers_work() -> None:
    learner, _, x = build("dll:kolen-pollack", "resnet")
    optim = torch.optim.AdamW(learner.param_groups(lr=1e-2))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 60)
    ema = torch.optim.swa_utils.AveragedModel(learner, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    losses = []
    for _ in range(60):
        optim.zero_grad()
        loss = loss_of(learner, x)
        loss.backward()
        whole = nn.utils.clip_grad_norm_(learner.model.parameters(), 0.5)
        own = nn.utils.clip_grad_norm_(learner.feedback.parameters(), 0.5)
        assert 0 < float(own) <= float(whole) + 1e-9
        optim.step()
        scheduler.step()
        ema.update_parameters(learner)
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    with torch.no_grad():
        assert ema(x).shape == learner(x).shape


def test_kolen_pollack_shrinks_the_difference_by_its_decay_under_plain_sgd() -> None:
    learner, _, x = build("dll:kolen-pollack")
    optim = torch.optim.SGD(learner.param_groups(lr=0.5))
    pairs = list(zip(learner.forward_weights, learner.feedback_weights, strict=True))
    before = [(theta - w).detach() for w, theta in pairs]
    loss_of(learner, x).backward()
    optim.step()
    for (w, theta), difference in zip(pairs, before, strict=True):
        assert_same((theta - w).detach(), difference * (1 - 0.5 * learner.decay))


def test_the_decay_follows_its_schedule_in_ones_own_loop_and_in_fit() -> None:
    schedule = [(0, 3e-3), (0.5, 5e-4)]
    learner = apical.make("dll:kolen-pollack", ResNet(), decay=schedule)
    optim = torch.optim.SGD(learner.param_groups(lr=0.1))
    scheduler = apical.DecayScheduler(optim, schedule, steps=4)

    def decays() -> dict[str, float]:
        return {group["name"]: group["weight_decay"] for group in optim.param_groups}

    seen = [decays()]
    for _ in range(3):
        optim.step()
        scheduler.step()
        seen.append(decays())
    assert [each["theta"] for each in seen] == [each["W mirrored"] for each in seen] == [3e-3, 3e-3, 5e-4, 5e-4]
    assert all(each["bias"] == 0 for each in seen)
    again = apical.DecayScheduler(optim, schedule, steps=4)
    assert decays()["theta"] == 3e-3
    again.load_state_dict(scheduler.state_dict())
    assert decays()["theta"] == 5e-4
    x, y = torch.randn(20, 4), torch.randint(0, 2, (20,))
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    settings = {"epochs": 4, "batch_size": 10, "lr": 0.5, "optimizer": "sgd", "schedule": "constant", "progress": False}
    made = apical.make("dll:kolen-pollack", model, decay=schedule)
    w, theta = made.forward_weights[1], made.feedback_weights[1]
    before = (theta - w).detach().double()
    apical.fit(made, (x, y, x, y), **settings)
    shrunk = before * (1 - 0.5 * 3e-3) ** 4 * (1 - 0.5 * 5e-4) ** 4
    assert_same((theta - w).detach().double(), shrunk, tolerance=1e-4)


@pytest.mark.parametrize("decay", [[], [(0.5, 1.0)], [(0, -1.0)], [(0, 1e-3), (0, 1e-3)], [(0, 1e-3, 1)], "0.1"])
def test_a_schedule_that_is_none_is_refused(decay: Any) -> None:
    with pytest.raises(apical.ApicalError, match="decay"):
        apical.make("dll:kolen-pollack", nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), decay=decay)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("resnet", "dll:kolen-pollack"),
        *(
            pytest.param(name, rule, marks=pytest.mark.slow)
            for name in ("resnet", "encoder", "lstm")
            for rule in ("fa", "sign", "dll", "dll:kolen-pollack", "readout")
        ),
    ],
)
def test_torch_compile_finds_one_graph_and_the_same_gradients(name: str, rule: str) -> None:
    learner, _, x = build(rule, name)
    learner.train(name == "resnet")  # the compiler draws other random numbers
    torch._dynamo.reset()
    compiled = torch.compile(learner, backend="aot_eager", fullgraph=name != "lstm")  # torch itself breaks it there
    grads = gradients_of(learner, lambda: run(compiled, x))
    assert_all_same(grads, gradients_of(learner, lambda: run(learner, x)))


@pytest.mark.slow
def test_torch_compile_keeps_the_rule_for_parameters_that_the_code_multiplies() -> None:
    learner, model, x = build("dll:kolen-pollack")
    learner.eval()
    expected = gradients_of(learner, lambda: run(learner, x))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    assert_all_same(gradients_of(learner, lambda: run(compiled, x)), expected)


def test_outputs_without_gradients_are_the_models_own() -> None:
    for name in ("gpt", "resnet"):
        learner, model, x = build("fa", name)
        reference = prepare(name)[2]
        for m in (learner, reference):
            m.eval()
        expected = reference(x).detach()
        with torch.no_grad():
            assert_same(learner(x), expected)
        with torch.inference_mode():
            assert_same(model(x).clone(), expected)


def test_a_frozen_part_does_not_learn_but_errors_pass_through_its_feedback_weights() -> None:
    learner, model, x = build("dll:kolen-pollack")
    expected = gradients_of(learner, lambda: loss_of(learner, x))
    model.blocks[1].requires_grad_(False)
    grads = gradients_of(learner, lambda: loss_of(learner, x))
    frozen = {f"model.blocks.1.{name}" for name, _ in model.blocks[1].named_parameters()}
    indices = {i for i, layer in enumerate(learner.network.layers) if layer.weight in frozen}
    left = {name: g for name, g in expected.items() if name not in frozen}
    assert_all_same(grads, {n: g for n, g in left.items() if n not in {f"feedback.{i}" for i in indices}})
    assert indices


def test_theta_of_a_frozen_embedding_that_is_tied_to_a_product_does_not_learn() -> None:
    """It would learn from the look-up, which is exact."""
    learner, model, x = build("dll:kolen-pollack", "gpt")
    model.tokens.weight.requires_grad_(False)
    grads = gradients_of(learner, lambda: loss_of(learner, x))
    tied = next(i for i, w in enumerate(learner.forward_weights) if w is model.tokens.weight)
    assert f"feedback.{tied}" not in grads
    assert any(name.startswith("feedback.") for name in grads)


def test_two_learners_of_one_model_learn_each_by_its_own_rule() -> None:
    own, model, _, x = prepare("resnet")
    one, other = own.make("fa", model, x), own.make("sign", model, x)
    ours = gradients_of(one, lambda: loss_of(one, x))
    theirs = gradients_of(other, lambda: loss_of(other, x))
    assert not torch.allclose(ours["model.stem.weight"], theirs["model.stem.weight"])
    assert_all_same(gradients_of(one, lambda: loss_of(one, x)), ours)
    own.make("bp", model, x)
    assert type(model.stem) is nn.Conv2d
    readout = apical.make("readout", model, head="fc")
    assert not model.stem.weight.requires_grad
    assert set(gradients_of(readout, lambda: loss_of(readout, x))) == {"model.fc.weight", "model.fc.bias"}
    assert_all_same(gradients_of(one, lambda: loss_of(one, x)), ours)
    assert model.stem.weight.requires_grad


def test_fit_trains_any_module_and_a_resumed_run_is_the_same_with_its_running_statistics(tmp_path: Any) -> None:
    x, y = torch.randn(60, 1, 6, 6), torch.randint(0, 3, (60,))
    data = (x[:40], y[:40], x[40:], y[40:])
    settings: dict[str, Any] = {"rule": "dll:kolen-pollack", "epochs": 3, "batch_size": 16, "progress": False}
    whole = apical.fit(ResNet, data, seeds=2, alignment=True, **settings)
    assert "CUDA graphs: the model is not read as layers" in whole.reasons
    path = tmp_path / "run.safetensors"
    apical.fit(ResNet, data, seeds=2, alignment=True, checkpoint=path, stop_after=1, **settings)
    resumed = apical.fit(ResNet, data, seeds=2, alignment=True, checkpoint=path, resume=True, **settings)
    alone = apical.fit(ResNet, data, seeds=[1], alignment=True, **settings)
    expected = whole.learners[1].state_dict()
    for run_ in (resumed.learners[1], alone.learners[0]):
        assert all(torch.equal(value, expected[name]) for name, value in run_.state_dict().items())
    assert int(expected["model.bn.num_batches_tracked"]) == 9
    assert [row["test_accuracy"] for row in resumed.of_seed(1)] == [row["test_accuracy"] for row in whole.of_seed(1)]
    cosines = whole.history[-1]["alignment"]
    assert cosines["feedback"][0] is None
    assert all(c is not None for c in cosines["update"])
    assert whole.learners[0].model.fc.link.carrier is whole.learners[0].carrier


def test_fit_counts_the_hits_of_every_token() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(5, 8), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.table(x))

    x = torch.randint(0, 5, (40, 3))
    fitted = apical.fit(Tokens, (x, x, x, x), rule="fa", epochs=30, lr=0.05, batch_size=10, progress=False)
    assert fitted.accuracy == 1.0
