"""Models of the transformers library, tiny and random, under every rule that takes any module."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import apical
from own_networks import FAMILY, STORED, tie_feedback_to_weights
from reference import assert_all_same

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TOKENS = {"vocab_size": 20, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def words() -> dict[str, Tensor]:
    tokens = torch.randint(3, 20, (2, 6))
    return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


def pictures() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 1, 8, 8).double(), "labels": torch.tensor([0, 2])}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]], str]] = {
    "gpt2": (
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=8, **TOKENS)
        ),
        words,
        "lm_head",
    ),
    "llama": (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **TOKENS)), words, "lm_head"),
    "bert": (
        lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, **TOKENS)),
        words,
        "cls.predictions.decoder",
    ),
    "vit": (
        lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=3, **SMALL)
        ),
        pictures,
        "classifier",
    ),
}


def build(name: str) -> tuple[nn.Module, dict[str, Tensor], str]:
    torch.manual_seed(0)
    make, inputs, head = MODELS[name]
    return make().double().train(), inputs(), head


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("rule", STORED)
def test_with_feedback_weights_equal_to_w_the_gradients_are_autograds(rule: str, name: str) -> None:
    model, inputs, _ = build(name)
    reference = copy.deepcopy(model)
    learner = apical.make(rule, model, example=inputs)
    tie_feedback_to_weights(learner)
    for each in (learner, reference):
        torch.manual_seed(1)
        each(**inputs).loss.backward()
    found, expected = ({n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (model, reference))
    assert_all_same(found, expected)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("rule", [*FAMILY, "readout"])
def test_every_rule_trains_it(rule: str, name: str) -> None:
    model, inputs, head = build(name)
    options: dict[str, Any] = {"head": head} if rule == "readout" else {}
    learner = apical.make(rule, model, example=inputs, output="logits", **options)
    optim = torch.optim.AdamW(learner.param_groups(lr=5e-3))
    model.eval()
    losses = []
    for _ in range(15):
        optim.zero_grad()
        loss = learner(**inputs).loss
        loss.backward()
        optim.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    targets = inputs.pop("labels")
    assert torch.isfinite(learner.credit(inputs, targets).loss)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_models_of_known_modules_need_no_example(name: str) -> None:
    model, inputs, _ = build(name)
    learner = apical.make("dll:kolen-pollack", model)
    learner(**inputs).loss.backward()
    assert all(theta.grad is not None for theta in learner.feedback_weights)


def test_gradient_checkpointing_of_the_library_changes_nothing() -> None:
    for reentrant in (True, False):
        model, inputs, _ = build("llama")
        learner = apical.make("dll:kolen-pollack", model)
        grads = []
        for on in (False, True):
            if on:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            learner.zero_grad()
            learner(**inputs).loss.backward()
            grads.append({n: p.grad.clone() for n, p in learner.named_parameters() if p.grad is not None})
        assert_all_same(grads[1], grads[0])


@pytest.mark.parametrize("name", list(MODELS))
def test_a_model_keeps_the_signature_that_libraries_look_at(name: str) -> None:
    model, inputs, _ = build(name)
    expected = inspect.signature(model.forward)
    learner = apical.make("fa", model, example=inputs)
    assert inspect.signature(model.forward) == expected
    assert inspect.signature(copy.deepcopy(learner).model.forward) == expected
    apical.make("bp", model)
    assert inspect.signature(model.forward) == expected
