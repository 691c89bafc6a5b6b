"""Generate text with a trained network: draw characters one by one from its predictions of the next one."""

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from apical.core.losses import one_hot
from apical.core.recurrent import Elman
from apical.engine import checkpoint as checkpoints
from apical.engine.checkpoint import Checkpoint
from apical.errors import ApicalError, CheckpointError, check_whole_number

SMALLEST_PROBABILITY = 1e-9
"""Outputs of a network trained with a squared error may be zero or negative; they are raised to this probability."""


def sample(
    checkpoint: str | Path, prompt: str = "", *, length: int = 500, temperature: float = 1.0, seed: int = 0
) -> str:
    """Return the prompt followed by `length` characters that the network of a checkpoint generates.

    checkpoint: the file of a run on characters; of several seeds, the first that did not fail is used.
    temperature: below 1, likely characters become more likely; at 0, the most likely one is always taken; above 1,
        likely characters become less likely.
    seed: of the random draws; the same seed gives the same text.

    The hidden state is zero before the prompt. It is never reset afterwards, even if the text is longer than the
    windows of the training.
    """
    _check_arguments(length, temperature, seed)
    path = Path(checkpoint)
    saved = checkpoints.load(path)
    if saved.vocabulary is None:
        raise CheckpointError(
            f"{path} is of a run on {saved.settings['data']}, which is not text; `apical sample` needs one of a run on "
            "characters, such as tinyshakespeare or text:PATH."
        )
    network, index_of = _rebuild_network(path, saved), {c: i for i, c in enumerate(saved.vocabulary)}
    for position, character in enumerate(prompt):
        if character not in index_of:
            raise ApicalError(
                f"the prompt holds {character!r} at position {position}, which the network has never seen; it knows "
                f"{saved.vocabulary!r}."
            )
    generator = torch.Generator().manual_seed(seed)
    text, unread = prompt, [index_of[c] for c in prompt]
    state = network.readout.weight.new_zeros(1, 1, network.rnn.hidden_size)
    with torch.no_grad():
        for _ in range(length):
            if unread:
                inputs = one_hot(torch.tensor([unread]), network.rnn.input_size, state.dtype)
                _, state = network.rnn(inputs, state)
            scores = network.readout(state[0, 0])[: len(index_of)].double()
            drawn = _draw(_to_log_probabilities(scores, saved.settings["loss"]), temperature, generator)
            text, unread = text + saved.vocabulary[drawn], [drawn]
    return text


def _check_arguments(length: int, temperature: float, seed: int) -> None:
    check_whole_number("length", length)
    if not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
        raise ApicalError(f"temperature is {temperature!r}, but must be a number of at least 0.")
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ApicalError(f"seed is {seed!r}, but must be a whole number from 0 to 2**63 - 1.")


def _rebuild_network(path: Path, saved: Checkpoint) -> Elman:
    """Build the recurrent network with the saved weights, on the CPU. Predictions do not need the learning rule."""
    assert saved.vocabulary is not None
    finite_seeds = [seed for seed in saved.settings["seeds"] if seed not in saved.failed]
    if not finite_seeds:
        raise CheckpointError(f"every seed of {path} diverged; there is no network to write with.")
    weights = {
        name.removeprefix("param/model."): tensor
        for name, tensor in saved.tensors[finite_seeds[0]].items()
        if name.startswith("param/model.")
    }
    try:
        (hidden, inputs), outputs = weights["rnn.weight_ih_l0"].shape, len(weights["readout.weight"])
        with torch.device("meta"):  # do not draw random weights that are replaced anyway
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


def _to_log_probabilities(scores: Tensor, loss: str) -> Tensor:
    """Convert scores to (unnormalised) log probabilities. Only with a squared error are the scores probabilities."""
    return scores.clamp(min=SMALLEST_PROBABILITY).log() if loss == "mse" else scores


def _draw(log_probabilities: Tensor, temperature: float, generator: torch.Generator) -> int:
    """Draw the index of a character."""
    if temperature == 0:
        return int(log_probabilities.argmax())
    scaled = (log_probabilities - log_probabilities.max()) / temperature  # a tiny temperature must not make it infinite
    return int(torch.multinomial(scaled.softmax(0), 1, generator=generator))
