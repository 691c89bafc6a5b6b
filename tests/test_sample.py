"""Text from checkpoints: greedy text equals a plain loop, draws have the probabilities that they should have."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import apical
from apical.engine import checkpoint as checkpoints
from apical.engine.checkpoint import Checkpoint
from apical.errors import ApicalError, CheckpointError
from cases import mostly_slow

VOCABULARY = "\n abé"


def elman(seed: int = 0, bias: bool = False, spread: float = 1.0, inputs: int = 5, outputs: int = 5) -> apical.Elman:
    torch.manual_seed(seed)
    network = apical.Elman(nn.RNN(inputs, 7, bias=bias, batch_first=True), nn.Linear(7, outputs, bias=bias)).double()
    with torch.no_grad():
        for weight in network.parameters():
            weight.normal_(std=spread)
    return network


def save(path: Path, *networks: nn.Module, **changes: Any) -> Path:
    """A checkpoint as a run writes it, of one network for each seed."""
    settings = {"rule": "bp", "model": "rnn", "data": "text:own", "loss": "cross_entropy", "epochs": 1}
    settings["seeds"] = list(range(len(networks)))
    tensors = {
        seed: {f"param/model.{name}": weight for name, weight in network.state_dict().items()}
        | {"optim/step": torch.zeros(1), "param/theta.1": torch.zeros(3)}
        for seed, network in enumerate(networks)
    }
    settings |= changes.pop("settings", {})
    checkpoints.save(
        path, Checkpoint(settings, 1, [], changes.pop("failed", {}), tensors, changes.pop("vocabulary", VOCABULARY))
    )
    return path


def scores_after(network: apical.Elman, text: str) -> Tensor:
    """What the network expects after a text, which it reads anew from the beginning."""
    with torch.no_grad():
        if not text:
            return network.readout(torch.zeros(7, dtype=torch.float64))
        return network(torch.tensor([[VOCABULARY.index(c) for c in text]]))[0, -1]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("prompt", ["a", "ab é\n", ""])
def test_greedy_text_equals_a_loop_that_reads_everything_anew(tmp_path: Path, bias: bool, prompt: str) -> None:
    network = elman(3, bias)
    expected = prompt
    for _ in range(40):
        expected += VOCABULARY[int(scores_after(network, expected).argmax())]
    path = save(tmp_path / "run.safetensors", network)
    assert apical.sample(path, prompt, length=40, temperature=0) == expected
    for cool in (1e-6, 1e-310):
        assert apical.sample(str(path), prompt, length=40, temperature=cool, seed=5) == expected or not prompt


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
@pytest.mark.parametrize("temperature", mostly_slow([0.5, 1, 2.0], [0.5]))
def test_draws_have_the_probabilities_that_the_network_gives(tmp_path: Path, temperature: float, loss: str) -> None:
    """p^(1/T), normalised: p is the softmax of the outputs, or the outputs themselves after a squared error."""
    network = elman(4, bias=True, spread=0.1)
    with torch.no_grad():
        network.readout.bias.copy_(torch.tensor([0.1, 0.6, 0.3, -0.5, 0.4]))
    path = save(tmp_path / "run.safetensors", network, settings={"loss": loss})
    scores = scores_after(network, "ab")
    p = scores.exp() if loss == "cross_entropy" else scores.clamp(min=0)
    p = p ** (1 / temperature)
    p = p / p.sum()
    assert 0.2 < float(p.max()) < 0.9
    count = 600
    drawn = Counter(apical.sample(path, "ab", length=1, temperature=temperature, seed=s)[-1] for s in range(count))
    for character, share in zip(VOCABULARY, p.tolist(), strict=True):
        error = math.sqrt(share * (1 - share) / count)
        assert drawn[character] / count == pytest.approx(share, abs=5 * error + 1e-6)


def test_the_same_seed_writes_the_same_text_and_others_another(tmp_path: Path) -> None:
    path = save(tmp_path / "run.safetensors", elman(spread=0.2))
    texts = [apical.sample(path, "ab", length=30, seed=seed) for seed in (0, 0, 1, 2)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3
    assert all(text.startswith("ab") and len(text) == 32 for text in texts)
    assert set("".join(texts)) <= set(VOCABULARY)


def test_nobody_elses_random_numbers_are_used_or_seeded(tmp_path: Path) -> None:
    path = save(tmp_path / "run.safetensors", elman())
    torch.manual_seed(1)
    first, state = apical.sample(path, length=9), torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    assert apical.sample(path, length=9) == first


def test_of_several_seeds_the_first_that_did_not_fail_writes(tmp_path: Path) -> None:
    networks = [elman(seed) for seed in range(3)]
    texts = [apical.sample(save(tmp_path / f"{i}.safetensors", one), "a", length=30) for i, one in enumerate(networks)]
    assert len(set(texts)) == 3
    both = save(tmp_path / "both.safetensors", *networks)
    assert apical.sample(both, "a", length=30) == texts[0]
    without = save(tmp_path / "without.safetensors", *networks, failed={0: "it diverged"})
    assert apical.sample(without, "a", length=30) == texts[1]
    none = save(tmp_path / "none.safetensors", *networks, failed=dict.fromkeys(range(3), "it diverged"))
    with pytest.raises(CheckpointError, match=r"every seed of .* diverged"):
        apical.sample(none)


def test_outputs_beyond_the_vocabulary_are_never_drawn(tmp_path: Path) -> None:
    path = save(tmp_path / "run.safetensors", elman(spread=0.1, inputs=6, outputs=9))
    assert set(apical.sample(path, "a", length=200)) <= set(VOCABULARY)


# Bad input.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"prompt": "abc"},
            r"the prompt holds 'c' at position 2, which the network has never seen; it knows '\\n abé'",
        ),
        ({"length": 0}, "length is 0"),
        ({"length": 2.5}, "length is 2.5"),
        ({"length": True}, "length is True"),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"seed": 0.5}, "seed is 0.5"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    path = save(tmp_path / "run.safetensors", elman())
    with pytest.raises(ApicalError, match=words) as caught:
        apical.sample(path, **options)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "run.safetensors", elman(), settings={"data": "mnist"}, vocabulary=None)
    with pytest.raises(CheckpointError, match="is of a run on mnist, which is not text"):
        apical.sample(path)


def test_a_checkpoint_of_another_network_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "run.safetensors", nn.Sequential(nn.Linear(5, 5)))
    with pytest.raises(CheckpointError, match=r"does not hold an apical\.Elman"):
        apical.sample(path)


def test_a_vocabulary_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "run.safetensors", elman(), vocabulary="abcdefgh")
    with pytest.raises(CheckpointError, match="it was altered"):
        apical.sample(path)


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.safetensors").write_text("First Citizen:")
    for name in ("run.safetensors", "nothing.safetensors"):
        with pytest.raises(CheckpointError, match=f"{name} is not a checkpoint that can be read"):
            apical.sample(tmp_path / name)
