"""Dendritic Localized Learning (Lv et al., ICML 2025), with four learning rules for its feedback weights Θ."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from apical.core.learner import Claims
from apical.core.losses import LossFunction
from apical.core.network import Params, Trace
from apical.core.recurrent import READOUT
from apical.core.synapse import Dense
from apical.core.validation import is_number, require_not_negative, require_one_of, require_positive, require_whole
from apical.core.wiring import FIXED, MIRROR, QUADRATIC
from apical.errors import ApicalError, UnsupportedError
from apical.rules.decay import read_decay
from apical.rules.feedback import Carry, FeedbackRule, choose_decay, draw_normal, relax_layers, relax_time


class DLL(FeedbackRule):
    """Errors arrive in the apical dendrites through trainable feedback weights Θ, never through Wᵀ:

        ξ_L = −∂loss/∂u_L                        the target arrives at the output
        ξ_i = Θ_iᵀ δ_i,  δ_i = φ′_i(ξ_{i+1})     the local error of the layer below
        ΔW_i = mean δ_i u_iᵀ                     pre × post, averaged over the batch

    and Θ changes at the same time, by one of four rules (`theta`):

        paper          ΔΘ_i = −mean δ_i ξ_iᵀ     as printed: descends ½‖ξ_i‖², so Θ shrinks along the errors
        released       ΔΘ_i = +mean δ_i ξ_iᵀ     the sign in the authors' MLP and CNN code
        frozen         ΔΘ_i = 0                  the paper's ablation DLL-FA; the same as `fa`
        kolen-pollack  ΔΘ_i = ΔW_i, and both decay: Θ comes to equal W (Kolen & Pollack 1994, Akrout et al. 2019)

    `theta_std` is Θ's initial spread: by default 1 in dense and 0.05 in convolutional and recurrent layers, and 0.05
    in all for kolen-pollack. In a model that is not read as layers it is that of each W, so that errors keep the size
    that they have in backpropagation, also where a normalisation makes up for the size of W. `theta_rate` is Θ's learning
    rate as a share of W's (0.1; kolen-pollack 1); `decay` is kolen-pollack's λ (1e-4), given to the optimiser as
    `weight_decay` of each Θ and the W that it mirrors; the first W and the biases, which have no Θ, decay by what
    `param_groups` is given as `weight_decay` (0). A schedule of λ is a list of pairs, [(0, 3e-3), (0.4, 5e-4)]: from a
    share of the run on, a decay. `fit` follows it, and in your own loop `apical.DecayScheduler` does.
    `sweeps` runs the paper's iterated relaxation of the errors that many times, with step `eta_x`, in place of
    the closed form above that it converges to.

    Laws: with Θ = W the W gradients equal `bp`'s; frozen equals `fa`; the paper's Θ gradient is autograd's of
    the batch mean of ½‖ξ_i‖² in Θ_i, δ held; under SGD without momentum and AdamW with equal rates η, kolen-pollack
    shrinks Θ − W by exactly 1 − ηλ a step.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    >>> learner = DLL(model)
    >>> _ = learner.feedback_weights[1].data.copy_(learner.forward_weights[1])
    >>> x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
    >>> _ = learner.credit(x, y)
    >>> (expected,) = torch.autograd.grad(torch.nn.functional.cross_entropy(model(x), y), [model[0].weight])
    >>> torch.allclose(model[0].weight.grad, expected, atol=1e-6)
    True
    """

    NAME = "dll"
    TITLE = "Dendritic localized learning"
    SOURCE = "Lv et al. 2025, Dendritic Localized Learning: Toward Biologically Plausible Algorithm (ICML)"
    FEEDBACK = "Θ, drawn once, then changed by `theta`"
    CLAIMS = Claims(c1=True, c2=True, c3=True)
    RECURRENT = True
    TRANSPORT = "theta"
    VARIANT = "theta"
    VARIANTS = ("paper", "released", "frozen", "kolen-pollack")

    def __init__(
        self,
        model: nn.Module,
        *,
        input_shape: tuple[int, ...] | None = None,
        loss: str | LossFunction = "cross_entropy",
        label_smoothing: float = 0.0,
        example: Any = None,
        output: str | int | None = None,
        theta: str = "paper",
        theta_std: float | None = None,
        theta_rate: float | None = None,
        decay: float | Sequence[tuple[float, float]] | None = None,
        eta_x: float = 1.0,
        sweeps: int | None = None,
    ) -> None:
        common: Any = {"input_shape": input_shape, "loss": loss, "label_smoothing": label_smoothing}
        super().__init__(model, **common, example=example, output=output)
        require_one_of(self.VARIANTS, theta=theta)
        is_kolen_pollack = theta == "kolen-pollack"
        require_positive(theta_std=theta_std)
        require_not_negative(theta_rate=theta_rate)
        require_whole(sweeps=sweeps)
        if eta_x != 1.0 and sweeps is None:
            raise ApicalError(f"eta_x is {eta_x!r}, but without sweeps= there is no relaxation that it could step.")
        if not (is_number(eta_x) and 0 < eta_x < 2):
            raise ApicalError(f"eta_x is {eta_x!r}, but the errors settle for 0 < eta_x < 2 alone.")
        self.theta = theta
        self.theta_std = theta_std
        self.theta_rate = (1.0 if is_kolen_pollack else 0.1) if theta_rate is None else theta_rate
        is_scheduled = is_kolen_pollack and decay is not None and not is_number(decay)
        self.decay_schedule = read_decay(decay) if is_scheduled else ()
        first: Any = self.decay_schedule[0][1] if is_scheduled else decay
        self.decay = choose_decay(first, is_kolen_pollack, "theta")
        self.eta_x, self.sweeps = eta_x, sweeps
        self.add_feedback_weights(
            lambda i, layer, w: draw_normal(layer.synapse.weight_shape, self._get_theta_std(layer.synapse, w), like=w),
            learns=theta != "frozen",
        )
        if self.network.is_general and sweeps is not None:
            raise UnsupportedError(
                "sweeps= relaxes the errors of layers, and this model is not read as layers; leave it out."
            )
        self.connect()

    @property
    def transport(self) -> str | None:
        if super().transport is None or self.sweeps is not None:
            return None
        mode = {"frozen": FIXED, "kolen-pollack": MIRROR}.get(self.theta, self.theta)
        # Θ of branches and time steps that share an input learns from the sum of their errors, which only a sweep has.
        shares = self.network.recurrent or any(len(tier.layers) > 1 for tier in self.network.tiers)
        return None if mode in QUADRATIC and shares else mode

    def touches(self, name: str) -> bool:
        """Return whether the rule updates this parameter. Kolen-Pollack's Θ does not learn if its W is frozen."""
        if self.theta != "kolen-pollack" or not name.startswith("feedback."):
            return True
        layer = self.network.layers[int(name.removeprefix("feedback."))]
        return self.params()[layer.weight].requires_grad

    def _get_theta_std(self, synapse: Any, w: Tensor) -> float:
        """Return the standard deviation of a layer's initial Θ."""
        if self.network.is_general and not (self.theta_std or w.is_meta):
            return w.detach().float().square().mean().sqrt().item() or 1 / math.sqrt(synapse.fan_out)
        recurrent = self.network.recurrent
        wide = isinstance(synapse, Dense) and not recurrent and self.theta != "kolen-pollack"
        return self.theta_std or (1.0 if wide else 0.05)

    def carry(self, params: Params, trace: Trace, xi: Tensor) -> Carry:
        carry = super().carry(params, trace, xi)
        if self.sweeps is None:
            return carry
        if self.network.recurrent:
            relaxed = relax_time(trace, xi, carry, self.eta_x, self.sweeps)
            # The relaxed errors already contain what comes from the next time step.
            return lambda i, delta, shape: relaxed if i == READOUT else torch.zeros_like(delta)
        settled = relax_layers(self.network, trace, xi, carry, self.eta_x, self.sweeps)
        return lambda i, delta, shape: settled[i]

    def feedback_gradient(self, i: int, xi: Tensor, delta: Tensor, grad: Tensor | None) -> Tensor | None:
        """Return Θ's gradient, −ΔΘ. For Kolen-Pollack it is a copy of W's gradient, or None if W is frozen."""
        if self.theta == "kolen-pollack":
            return None if grad is None else grad.clone()
        return self.network.layers[i].synapse.outer(xi, delta, scale=1.0 if self.theta == "paper" else -1.0)

    def param_groups(self, lr: float, **options: Any) -> list[dict[str, Any]]:
        """Return the groups `W` (kolen-pollack: `W` for the first layer, `W mirrored` for the others), `bias`, `theta`."""
        theta, theta_lr = list(self.feedback_names.values()), lr * self.theta_rate
        if self.theta != "kolen-pollack":
            return super().param_groups(lr, **options) + self._groups(theta_lr, options, theta=theta)
        upper = self.network.upper
        first = [layer for i, layer in enumerate(self.network.layers) if i not in upper]
        own, decayed = {"weight_decay": 0.0, **options}, {**options, "weight_decay": self.decay}
        return [
            *self._groups(lr, own, W=[layer.weight for layer in first]),
            *self._groups(lr, decayed, **{"W mirrored": [layer.weight for layer in upper.values()]}),
            *self._groups(lr, own, bias=self.network.list_other_parameters()),
            *self._groups(theta_lr, decayed, theta=theta),
        ]
