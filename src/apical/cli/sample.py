"""`apical sample`: write text with a trained network."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

import apical
from apical.cli.root import OptionNamingCommand, app, echo


@app.command(cls=OptionNamingCommand)
def sample(
    checkpoint: Annotated[Path, Argument(help="Checkpoint (.safetensors) of a run on characters.")],
    prompt: Annotated[str, Option(help="How the text begins.")] = "",
    length: Annotated[int, Option(help="Characters to write after the prompt.")] = 500,
    temperature: Annotated[float, Option(help="Below 1: likely characters more often; 0: always the likeliest.")] = 1.0,
    seed: Annotated[int, Option(help="Of the draws: the same seed writes the same text.")] = 0,
) -> None:
    """Write text with a network that was trained on characters.

    Example: apical sample runs/tinyshakespeare-rnn-dll.safetensors --prompt "KING:" --length 300 --temperature 0.7
    """
    echo(apical.sample(checkpoint, prompt, length=length, temperature=temperature, seed=seed))
