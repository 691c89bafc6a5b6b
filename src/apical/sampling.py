"""Text from a checkpoint: characters drawn one after the other, each from what the network expects next."""

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from apical.core.recurrent import Elman, one_hot
from apical.engine import checkpoint as checkpoints
from apical.engine.checkpoint import Checkpoint
from apical.errors import ApicalError, CheckpointError

TINY = 1e-9
"""What is left of a probability that a squared error made zero or negative."""


def sample(
    checkpoint: str | Path, prompt: str = "", *, length: int = 500, temperature: float = 1.0, seed: int = 0
) -> str:
    """The prompt, and `length` characters that the network of a checkpoint writes after it.

    checkpoint: the file of a run on characters; of several seeds, the first that did not fail writes.
    temperature: below 1 likely characters become likelier, at 0 the likeliest is always taken; above 1 they become
        less likely.
    seed: of the draws; the same seed gives the same text.

    The state is zero before the prompt and is carried on from there, also beyond the window of the training: a text
    has no windows.
    """
    _check(length, temperature, seed)
    path = Path(checkpoint)
    saved = checkpoints.load(path)
    if saved.vocabulary is None:
        raise CheckpointError(
            f"{path} is of a run on {saved.settings['data']}, which is not text; `apical sample` needs one of a run on "
            "characters, such as tinyshakespeare or text:PATH."
        )
    network, numbers = _network(path, saved), {c: i for i, c in enumerate(saved.vocabulary)}
    for place, character in enumerate(prompt):
        if character not in numbers:
            raise ApicalError(
                f"the prompt holds {character!r} at position {place}, which the network has never seen; it knows "
                f"{saved.vocabulary!r}."
            )
    generator = torch.Generator().manual_seed(seed)
    text, unread = prompt, [numbers[c] for c in prompt]
    state = network.readout.weight.new_zeros(1, 1, network.rnn.hidden_size)
    with torch.no_grad():
        for _ in range(length):
            if unread:
                hot = one_hot(torch.tensor([unread]), network.rnn.input_size, state.dtype)
                _, state = network.rnn(hot, state)
            scores = network.readout(state[0, 0])[: len(numbers)].double()
            drawn = _draw(_log(scores, saved.settings["loss"]), temperature, generator)
            text, unread = text + saved.vocabulary[drawn], [drawn]
    return text


def _check(length: int, temperature: float, seed: int) -> None:
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ApicalError(f"length is {length!r}, but must be a whole number of at least 1.")
    if not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
        raise ApicalError(f"temperature is {temperature!r}, but must be a number of at least 0.")
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ApicalError(f"seed is {seed!r}, but must be a whole number from 0 to 2**63 - 1.")


def _network(path: Path, saved: Checkpoint) -> Elman:
    """The recurrent network itself, on the CPU: the rule that trained it has no part in what it predicts."""
    assert saved.vocabulary is not None
    sound = [seed for seed in saved.settings["seeds"] if seed not in saved.failed]
    if not sound:
        raise CheckpointError(f"every seed of {path} diverged; there is no network to write with.")
    weights = {
        name.removeprefix("param/model."): tensor
        for name, tensor in saved.tensors[sound[0]].items()
        if name.startswith("param/model.")
    }
    try:
        (hidden, inputs), outputs = weights["rnn.weight_ih_l0"].shape, len(weights["readout.weight"])
        with torch.device("meta"):  # no random weights are drawn that would only be replaced
            rnn = nn.RNN(inputs, hidden, bias="rnn.bias_ih_l0" in weights, batch_first=True)
            network = Elman(rnn, nn.Linear(hidden, outputs, bias="readout.bias" in weights))
        network.load_state_dict(weights, assign=True)
    except (KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} does not hold an apical.Elman, the one kind of network that can write: {error}."
        ) from error
    if len(saved.vocabulary) > min(inputs, outputs):
        raise CheckpointError(f"{path} is not a checkpoint that can be read: it was altered.")
    return network


def _log(scores: Tensor, loss: str) -> Tensor:
    """Scores as log probabilities: a squared error makes the outputs probabilities, other losses their logarithms."""
    return scores.clamp(min=TINY).log() if loss == "mse" else scores


def _draw(log: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(log.argmax())
    return int(torch.multinomial((log / temperature).softmax(0), 1, generator=generator))
