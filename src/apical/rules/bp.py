"""Backpropagation, the reference, and the readout, the control that every rule should beat."""

from torch import Tensor

from apical.core.learner import Claims
from apical.core.network import Params
from apical.rules.feedback import FeedbackRule


class Readout(FeedbackRule):
    """The control: only the last layer learns, by its own error; hidden layers keep their random weights.

    No error leaves the last layer, so a rule whose hidden layers do not help cannot beat it.
    Law: hidden gradients are absent; the last layer's equal `bp`'s.
    """

    NAME = "readout"
    TITLE = "Readout (control)"
    SOURCE = "control: a trained readout on frozen random features"
    FEEDBACK = "none: no error leaves the last layer"
    RECURRENT = True

    def touches(self, name: str) -> bool:
        return any(name in (layer.weight, layer.bias) for layer in self.network.top)


class Backpropagation(FeedbackRule):
    """ξ_i = W_iᵀ δ_i: the error goes down through the transpose of the forward weights.

    In a recurrent network this is backpropagation through time. Law: equals `torch.autograd`.
    """

    NAME = "bp"
    TITLE = "Backpropagation"
    SOURCE = "Rumelhart, Hinton & Williams 1986, Learning representations by back-propagating errors"
    FEEDBACK = "the forward weights W themselves, transposed"
    CLAIMS = Claims(c1=False, c2=False, c3=False)
    RECURRENT = True

    def backward_weights(self, params: Params) -> dict[int, Tensor]:
        return {i: params[layer.weight] for i, layer in self.network.upper.items()}
