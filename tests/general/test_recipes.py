"""The recipes of the guide run as they are, learn, and learn by the rule: what they step on is the rule's gradient."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import apical
from pages import DOCS, blocks

SHARED, *RECIPES = blocks("python", page=DOCS / "recipes.md")
PACKAGES = {"lightning": "pytorch_lightning", "trainer": "transformers", "amp": "sklearn", "accelerate": "accelerate"}
NAMES = list(PACKAGES)
PARTS = {"amp": 2, "accelerate": 2}
"""Micro-batches that are accumulated for one step."""


class Witness:
    """Keeps a copy of the learner as it was made, the inputs that it was trained on, and what the optimiser was given."""

    def __init__(self) -> None:
        self.inputs: list[Any] = []
        self.shrinkage = 0.0
        self.first: dict[str, Tensor] = {}

    def make(self, *args: Any, **options: Any) -> Any:
        self.learner = apical.core.registry.make(*args, **options)
        self.twin = copy.deepcopy(self.learner)
        self.learner.register_forward_pre_hook(self.note_input, with_kwargs=True)
        return self.learner

    def note_input(self, _: nn.Module, args: tuple[Tensor, ...], named: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and not self.first:
            self.inputs.append(dict(named) if named else args[0].detach())

    def note_step(self, optim: torch.optim.Optimizer, *_: Any) -> None:
        (theta,) = (group for group in optim.param_groups if group.get("name") == "theta")
        self.shrinkage += math.log1p(-theta["lr"] * theta["weight_decay"])
        if not self.first:
            self.first = {n: p.grad.clone() for n, p in self.learner.named_parameters() if p.grad is not None}


def find_batch(given: Any, x: Tensor, y: Tensor) -> tuple[Any, Tensor]:
    """The inputs of one micro-batch without their labels, and the labels, which for plain images are found in the data."""
    if isinstance(given, dict):
        return {"pixel_values": given["pixel_values"]}, given["labels"]
    places = (given.flatten(1)[:, None] == x.flatten(1)).all(2).int().argmax(1)
    return given, y[places]


def cosine(one: Tensor, other: Tensor) -> float:
    return float(nn.functional.cosine_similarity(one.double().flatten(), other.double().flatten(), 0))


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_learns_by_the_rule(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("sklearn", PACKAGES[name]):  # imported here: slow, and each process collects every file
        pytest.importorskip(package)
    code = RECIPES[NAMES.index(name)]
    assert len(code.splitlines()) <= 35
    if name in ("trainer", "accelerate"):
        accelerate_state = pytest.importorskip("accelerate.state")
        accelerate_state.AcceleratorState._reset_state(reset_partial_state=True)
    witness, found = Witness(), {}
    monkeypatch.setattr(apical, "make", witness.make)
    monkeypatch.chdir(tmp_path)
    handle = register_optimizer_step_pre_hook(witness.note_step)
    try:
        exec(SHARED + code, found)
    finally:
        handle.remove()
    learner, twin = witness.learner, witness.twin
    assert found["learner"] is learner
    assert found["accuracy"] > 0.7

    batches = [find_batch(x, found["x_train"], found["y_train"]) for x in witness.inputs[-PARTS.get(name, 1) :]]
    reference = apical.make("bp", copy.deepcopy(twin.model), output=twin.output)
    before = sum(float(twin.credit(*batch).loss) for batch in batches)
    for batch in batches:
        reference.credit(*batch)
    after = sum(float(copy.deepcopy(learner).credit(*batch).loss) for batch in batches)
    assert after < before / 2
    expected = {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
    assert set(witness.first) == set(expected)
    lowest = twin.network.layers[0].weight
    for key, gradient in witness.first.items():
        if expected[key].norm() > 1e-6:
            assert cosine(gradient, expected[key]) > 0.99, key
    assert cosine(witness.first[lowest], reference.get_parameter(lowest).grad) < 0.9

    # Θ was given W's gradient at every step: Θ − W only shrank by the decay.
    pairs = [list(zip(each.forward_weights, each.feedback_weights, strict=True)) for each in (twin, learner)]
    for (w0, theta0), (w, theta) in zip(*pairs, strict=True):
        if theta is not None:
            difference = (theta0 - w0).detach() * math.exp(witness.shrinkage)
            assert (theta - theta0).norm() > 0.1 * difference.norm()
            torch.testing.assert_close((theta - w).detach(), difference, rtol=1e-3, atol=1e-4)


def test_a_checkpoint_of_the_trainer_resumes_with_all_of_the_learner(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate.state").AcceleratorState._reset_state(reset_partial_state=True)
    tokens = torch.randint(3, 20, (32, 6))
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )

    def train(steps: int, folder: str, resume: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        learner = apical.make("dll:kolen-pollack", transformers.LlamaForCausalLM(config))
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path / folder),
            max_steps=steps,
            save_steps=2,
            gradient_accumulation_steps=2,
            lr_scheduler_type="constant",
            remove_unused_columns=False,
            label_names=["labels"],
            report_to=[],
            use_cpu=True,
        )
        trainer = transformers.Trainer(
            model=learner,
            args=args,
            train_dataset=[{"input_ids": t, "labels": t} for t in tokens],
            optimizers=(torch.optim.AdamW(learner.param_groups(lr=1e-2)), None),
        )
        trainer.train(resume_from_checkpoint=resume)
        return dict(learner.state_dict())

    whole = train(4, "whole", resume=False)
    half = train(2, "half", resume=False)
    resumed = train(4, "half", resume=True)
    theta = "feedback.0"
    assert not torch.equal(half[theta], whole[theta])
    assert all(torch.equal(value, whole[name]) for name, value in resumed.items())
