"""The audit of learners whose model is any module: feedback weights keep C1, and a planted transport does not."""

import copy
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apical
from own_networks import prepare

SLOW = [
    ("encoder", "dll"),
    ("gpt", "fa"),
    ("gpt", "dll:kolen-pollack"),
    ("lstm", "fa"),
    ("resnet", "fa"),
    ("resnet", "dll"),
    ("cells", "dll"),
]


@pytest.mark.parametrize(
    ("name", "rule"), [("rnn", "dll"), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_feedback_weights_meet_c1_and_backpropagation_does_not(name: str, rule: str) -> None:
    own, model, _, x = prepare(name)
    y = x if name == "gpt" else torch.randint(0, 3, x.shape[:1])
    assert apical.audit(own.make(rule, model, x), x, y).c1 is True
    assert apical.audit(own.make("bp", model, x), x, y).c1 is False


def test_a_planted_transport_does_not_meet_c1() -> None:
    class Planted(nn.Module):
        """The output is that of two wired layers, but an error also passes through a copy of the second one's weights."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.first(x))
            with torch.no_grad():
                copied = self.second.weight.clone()
            through = F.linear(h, copied)
            return self.second(h.detach()) + through - through.detach()

    x, y = torch.randn(8, 6), torch.randint(0, 4, (8,))
    learner = apical.make("fa", Planted(), example=x)
    assert apical.audit(learner, x, y).c1 is not True


class Two(nn.Module):
    """Takes two inputs, of which one may be tokens, and a factor for all examples; returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.a, self.b, self.out = nn.Embedding(9, 6), nn.Linear(6, 7), nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, tokens: Tensor, other: Tensor, factors: Tensor | None = None) -> dict[str, Tensor]:
        h = torch.tanh(self.a(self.table(tokens)).mean(1) + self.b(other))
        return {"logits": self.out(h if factors is None else h * factors)}


@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "mapping"])
def test_a_model_with_several_inputs_is_judged(kind: str) -> None:
    tokens, other, y = torch.randint(0, 9, (4, 3)), torch.randn(4, 5), torch.tensor([0, 1, 2, 0])
    named = {"tokens": tokens, "other": other, "factors": torch.rand(7)}
    x: Any = {"tuple": (tokens, other), "list": [tokens, other], "dict": named, "mapping": MappingProxyType(named)}[
        kind
    ]
    for rule, met in (("fa", True), ("bp", False)):
        learner = apical.make(rule, Two(), output="logits")
        before = copy.deepcopy(learner.state_dict())
        found = apical.audit(learner, x, y)
        assert (found.c1, found.c2, found.c3) == (met, True, False)
        assert not found.facts["not_followed"]
        assert all(layer["depends_on"]["target"] for layer in found.facts["layers"])
        assert not any(layer["depends_on"]["batch"] for layer in found.facts["layers"])
        assert all(torch.equal(value, before[name]) for name, value in learner.state_dict().items())


def test_what_cannot_be_judged_is_one_sentence() -> None:
    tokens, other, y = torch.randint(0, 9, (4, 3)), torch.randn(4, 5), torch.tensor([0, 1, 2, 0])
    learner = apical.make("fa", Two(), output="logits")
    for given, targets, word in ((tokens.numpy(), y, "ndarray"), ((tokens, other), {"y": y}, "dict")):
        with pytest.raises(apical.ApicalError, match=word):
            apical.audit(learner, given, targets)
    with pytest.raises(apical.ApicalError, match="output="):
        apical.audit(apical.make("fa", Two()), (tokens, other), y)


class Turned(nn.Module):
    """Weights that are stored as (inputs, outputs), and modules that do not act in the order in which they are made."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.middle = nn.Parameter(torch.randn(11, 3) / 3), nn.Parameter(torch.randn(14, 11) / 3)
        self.first = nn.Linear(12, 14)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(self.first(x)) @ self.middle) @ self.last


@pytest.mark.parametrize(("rule", "met"), [("fa", True), ("dll", True), ("dll:kolen-pollack", True), ("bp", False)])
def test_the_direction_and_the_order_of_weights_are_those_in_which_they_act(rule: str, met: bool) -> None:
    x, y = torch.randn(2, 12), torch.tensor([0, 1])
    found = apical.audit(apical.make(rule, Turned(), example=x), x, y)
    assert (found.c1, found.c2, found.c3) == (met, True, False)
    layers = {layer["weight"]: layer for layer in found.facts["layers"]}
    assert list(layers) == ["model.last", "model.middle", "model.first.weight"]
    assert [len(layer["waits_for"]) for layer in layers.values()] == [0, 1, 2]
    assert all(layer["activity"]["computed"] == 1 for layer in layers.values())
    if rule == "bp":
        assert {finding["weight"] for finding in found.facts["transport"]} == {"model.last", "model.middle"}
    if rule == "fa":  # the interventions had room on the model itself
        assert found.facts["interventions"]["matrices"] == {"model.last": True, "model.middle": True}


class Tied(nn.Module):
    """The weights of the last layer are also looked up by the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.middle, self.head = nn.Embedding(9, 14), nn.Linear(14, 14), nn.Linear(14, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.table(tokens))).mean(1))


@pytest.mark.parametrize(("rule", "met"), [("fa", True), ("dll:kolen-pollack", True), ("bp", False)])
def test_a_look_up_of_tied_weights_is_no_transport(rule: str, met: bool) -> None:
    found = apical.audit(apical.make(rule, Tied()), torch.tensor([[0, 3], [1, 2]]), torch.tensor([4, 5]))
    assert found.c1 is met
    transported = {finding["weight"] for finding in found.facts["transport"]}
    assert transported == (set() if met else {"model.table.weight", "model.middle.weight"})


class Around(nn.Module):
    """A module between two layers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.second = nn.Linear(6, 8), inner, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = (
            self.inner(h, h, h, need_weights=False)[0]
            if isinstance(self.inner, nn.MultiheadAttention)
            else self.inner(h)
        )
        return self.second(torch.tanh(h).mean(1) if h.ndim > 2 else torch.tanh(h))


BETWEEN: dict[str, tuple[nn.Module, tuple[int, ...], bool]] = {
    "batch norm": (nn.BatchNorm1d(8), (4, 6), True),
    "layer norm": (nn.LayerNorm(8), (4, 6), False),
    "layer norm of tokens": (nn.LayerNorm(8), (4, 2, 6), False),
    "layer norm of the batch": (nn.LayerNorm((4, 8)), (4, 6), True),
    "group norm": (nn.GroupNorm(2, 8), (4, 6), False),
    "attention": (nn.MultiheadAttention(8, 2, batch_first=True), (4, 2, 6), False),
}


@pytest.mark.parametrize("what", list(BETWEEN))
def test_normalisation_and_attention_keep_c1_and_the_facts_say_whether_examples_mix(what: str) -> None:
    inner, shape, mixes = BETWEEN[what]
    x, y = torch.randn(shape), torch.tensor([0, 1, 2, 0])
    found = apical.audit(apical.make("fa", Around(copy.deepcopy(inner)), example=x), x, y)
    assert found.c1 is True
    assert found.facts["layers"][0]["depends_on"]["batch"] is mixes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
def test_models_of_transformers_are_judged(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    words = {"vocab_size": 20, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    tokens, y = torch.randint(3, 20, (4, 3)), torch.tensor([0, 1, 2, 0])
    make, config, x, targets = {
        "gpt2": (
            transformers.GPT2LMHeadModel,
            transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=8, **words),
            {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)},
            tokens,
        ),
        "llama": (
            transformers.LlamaForCausalLM,
            transformers.LlamaConfig(**small, **words),
            {"input_ids": tokens},
            tokens,
        ),
        "bert": (
            transformers.BertForSequenceClassification,
            transformers.BertConfig(**small, **words, num_labels=3),
            transformers.BatchEncoding({"input_ids": tokens}),
            y,
        ),
        "vit": (
            transformers.ViTForImageClassification,
            transformers.ViTConfig(image_size=4, patch_size=2, num_channels=1, num_labels=3, **small),
            {"pixel_values": torch.randn(4, 1, 4, 4)},
            y,
        ),
    }[name]
    for rule, met in (("fa", True), ("dll", True), ("dll:kolen-pollack", True), ("sign", False), ("bp", False)):
        learner = apical.make(rule, make(config), example=x, output="logits")
        assert apical.audit(learner, x, targets).c1 is met, rule
