"""Perturbation: shake the weights or the neurons, and keep what made the loss fall."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from apical.core.activation import Noise
from apical.core.learner import Claims, Learner, Update
from apical.core.memory_order import in_order_of, lying, standing
from apical.core.network import Params
from apical.core.synapse import Dense, Synapse
from apical.core.units import groups_of, mixed, per_row, samples_of
from apical.core.validation import require_bool, require_positive, require_whole
from apical.errors import UnsupportedError

Shaken = Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]]
"""Shaken weights -> the loss and the output with them."""
DRIVE = ".drive"
"""Noise on the drive of layer 2 is called `.drive2`: no module's name begins with a dot."""


class Perturbation(Learner):
    """What both rules share: `sigma`, the size of the noise, and `samples`, how many draws are averaged."""

    FEEDBACK = "none: one number, the change of the loss, reaches every synapse"
    CLAIMS = Claims(c1=True, c2=True, c3=False)

    def __init__(self, *args: Any, sigma: float, samples: int, **common: Any) -> None:
        super().__init__(*args, **common)
        require_positive(sigma=sigma)
        require_whole(samples=samples)
        self.sigma, self.samples = float(sigma), samples


class WeightPerturbation(Perturbation):
    """All weights are shaken at once, by one ξ ~ N(0, 1) for each weight, the same for the whole batch:

        ΔW = −ξ (L(W + σξ) − L(W − σξ)) / 2σ       L the mean loss of the batch

    averaged over `samples` draws of ξ. With `antithetic=False` the second pass is the unshaken one, and the
    difference is (L(W + σξ) − L(W)) / σ: K + 1 passes for K samples in place of 2K, and a bias of order σ, not σ².

    Law: for small σ the mean over draws is `bp`'s gradient; the variance of each entry of one draw is
    ‖g‖² + g², g being that gradient over all weights, so its error grows with the number of weights.
    Where no unshaken pass is made, the output (and the loss) reported is that of the mean over the shaken ones.
    """

    NAME = "wp"
    TITLE = "Weight perturbation"
    SOURCE = "Werfel, Xie & Seung 2003, Learning curves for stochastic gradient descent in linear feedforward networks"
    PARALLEL = True

    def __init__(
        self, *args: Any, sigma: float = 1e-3, samples: int = 1, antithetic: bool = True, **common: Any
    ) -> None:
        super().__init__(*args, sigma=sigma, samples=samples, **common)
        require_bool(antithetic=antithetic)
        self.antithetic = antithetic

    def draw(self, x: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """ξ of each weight that learns, one for each sample, by the weight's name."""
        noise, trainable = super().draw(x, generator), self.trainable
        for name, p in self.params().items():
            if name in trainable:
                shape = (self.samples, *p.shape)
                noise[name] = torch.randn(shape, dtype=x.dtype, device=x.device, generator=generator)
        return noise

    def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        trainable, sigma = self.trainable, self.sigma
        xi = {name: noise[name] for name in params if name in trainable}

        def shaken(weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            output = self.network.predict({**params, **weights}, x, noise)
            return self.loss(output, y).mean(), output

        if self.antithetic:
            there = {name: both(params[name][None], e, sigma, self.samples) for name, e in xi.items()}
        else:
            there = {name: params[name] + sigma * e for name, e in xi.items()}
        losses, outputs = together(shaken, there)
        if self.antithetic:
            output = outputs.mean(0)
            loss = self.loss(output, y).mean()
            up, down = losses.chunk(2)
            slope = (up - down) / (2 * sigma)
        else:
            output = self.network.predict(params, x, noise)
            loss = self.loss(output, y).mean()
            slope = (losses - loss) / sigma
        grads = {name: torch.tensordot(slope.to(e.dtype) / self.samples, e, dims=1) for name, e in xi.items()}
        return Update(grads, {}, loss, output)


class NodePerturbation(Perturbation):
    """Every neuron of every example is shaken before its φ, by a ξ ~ N(0, 1) of its own, in two passes at once:

        a_i± = W_i u_i± + b_i ± σξ_i,   u_{i+1}± = φ_i(a_i±)
        ΔW_i = −mean ξ_i (ℓ₊ − ℓ₋)/2σ · ū_iᵀ       ℓ each example's own loss, ū = (u₊ + u₋)/2

    averaged over `samples` draws. With `decorrelate=True` (Dalm et al. 2023) a layer sees R_i u_i in place of u_i,
    and R_i, a buffer that starts as the identity, loses what is left of the correlations (`decorrelation_rate` ε):

        R ← R − ε (C − diag C) R,   C = ⟨(R u)(R u)ᵀ⟩,   u the mean over all passes

    In a convolution, as published, u is the patch under the kernel and C is taken over patches of all positions.
    The layer is then W R, so the plain model, which has W alone, does not give the predictions: `learner(x)` does.

    Law: for small σ the mean over draws is `bp`'s gradient (of the network with weights W R, in W). A draw is
    noisy by the number of neurons, not of weights, and every example has its own.
    The output (and the loss) reported is that of the mean over the noisy passes.
    """

    NAME = "np"
    TITLE = "Node perturbation"
    SOURCE = "Dalm, Offergeld, Ahmad & van Gerven 2023, Effective learning with node perturbation in deep neural networks"

    def __init__(
        self,
        *args: Any,
        sigma: float = 0.01,
        samples: int = 1,
        decorrelate: bool = False,
        decorrelation_rate: float = 1e-3,
        **common: Any,
    ) -> None:
        super().__init__(*args, sigma=sigma, samples=samples, **common)
        require_positive(decorrelation_rate=decorrelation_rate)
        require_bool(decorrelate=decorrelate)
        self.decorrelate, self.decorrelation_rate = decorrelate, float(decorrelation_rate)
        self.MODEL_PREDICTS = not decorrelate  # type: ignore[misc]  # true of an instance, not of the class
        self._r = {i: f"decorrelation_{i}" for i in range(len(self.network))} if decorrelate else {}
        for i, name in self._r.items():
            w, groups = self.forward_weights[i], groups_of(self.network.layers[i].synapse)
            identity = torch.eye(w[0].numel(), dtype=w.dtype, device=w.device)
            self.register_buffer(name, identity.repeat(groups, 1, 1))

    @property
    def paced(self) -> frozenset[str]:
        """R: once W has come to rest, nothing would follow an R that still moves."""
        return frozenset(self._r.values())

    def effective(self, params: Params, state: Params, among: Iterable[int]) -> Params:
        """The weights that act on a layer's plain input: W R for the layers `among`, W for the others."""
        names = {i: self.network.layers[i].weight for i in among}
        return {**params, **{name: mixed(params[name], state[self._r[i]]) for i, name in names.items()}}

    def predict(self, params: Params, state: Params, x: Tensor) -> Tensor:
        return self.network.predict(self.effective(params, state, self._r), x, {})

    def learning(self) -> list[int]:
        """The layers whose neurons are shaken: those with anything to learn."""
        trainable, layers = self.trainable, self.network.layers
        return [i for i, layer in enumerate(layers) if {layer.weight, layer.bias} & trainable]

    def draw(self, x: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """ξ of each neuron, example and sample, by layer."""
        noise, drives = super().draw(x, generator), self.network.shapes(x.shape[1:]).drives
        for i in self.learning():
            shape = (self.samples * x.shape[0], *drives[i])
            noise[f"{DRIVE}{i}"] = torch.randn(shape, dtype=x.dtype, device=x.device, generator=generator)
        return noise

    def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        learning, trainable, passes = self.learning(), self.trainable, 2 * self.samples
        # A batch has fewer rows than a dense layer has units, so R u costs less than W R; patches are many more.
        dense = {i for i in self._r if isinstance(self.network.layers[i].synapse, Dense)}
        weights = self.effective(params, state, self._r.keys() - dense)
        u, seen, shakes = self.network.prefix(x, noise), {}, {}
        for i, layer in enumerate(self.network.layers):
            u = u @ state[self._r[i]][0].mT if i in dense else u
            drive = layer.forward(weights, u)
            if i in learning:
                seen[i] = u if i == learning[0] else averaged(u, 2)
                shakes[i] = in_order_of(drive, noise[f"{DRIVE}{i}"])
                drive = both(drive, shakes[i], self.sigma, self.samples)
            if i == learning[0]:
                noise = {n: e if n.startswith(DRIVE) else repeated(e, passes) for n, e in noise.items()}
            u = layer.neuron(drive, noise)
        up, down = self.loss(u, repeated(y, passes)).chunk(2)
        slope = (up - down) / (2 * self.sigma)  # one for each example and sample
        grads, new = {}, {}
        for i in learning:
            layer, xi = self.network.layers[i], shakes[i]
            xi = xi * per_row(slope, xi)
            if i == learning[0]:  # below it nothing was shaken: all samples share one input
                xi = averaged(xi, self.samples)
            if layer.weight in trainable:
                gradient = layer.synapse.outer(seen[i], xi)
                if i in self._r:
                    r, v = state[self._r[i]], seen[i]
                    v = v if i == learning[0] else averaged(v, self.samples)
                    if i not in dense:
                        gradient, v = mixed(gradient, r.mT), of_patches(layer.synapse, r, v)
                    v = samples_of(layer.synapse, v)
                    new[self._r[i]] = decorrelated(r, v, self.decorrelation_rate)
                grads[layer.weight] = gradient
            if layer.bias is not None and layer.bias in trainable:
                grads[layer.bias] = layer.synapse.total(xi)
        output = averaged(u, passes)
        return Update(grads, new, self.loss(output, y).mean(), output)


def together(shaken: Shaken, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """All passes as one, each with its own weights."""
    if torch.compiler.is_compiling() or any(map(torch._C._functorch.is_batchedtensor, weights.values())):
        return torch.vmap(shaken)(weights)
    try:
        return torch.vmap(shaken)(weights)
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        why = str(error).splitlines()[0]
        raise UnsupportedError(
            f"wp makes all of its passes at once, which a module of this network does not take ({why})."
        ) from error


def both(drive: Tensor, xi: Tensor, sigma: float, samples: int) -> Tensor:
    """a + σξ of all samples, then a − σξ, in one operation: these are the largest arrays of a step.

    Weights, and the first drive to be shaken, are the same for all samples; other drives have the two halves already.
    """
    xi = xi.unflatten(0, (1, samples, -1))
    drive = drive.unflatten(0, (1, 1, -1) if len(drive) == xi.shape[2] else (2, samples, -1))
    shift = torch.linspace(sigma, -sigma, 2, dtype=xi.dtype, device=xi.device)
    return torch.addcmul(drive, xi, shift.view(2, *[1] * (xi.ndim - 1))).flatten(0, 2)


def repeated(e: Tensor, times: int) -> Tensor:
    """The whole batch, one copy after another."""
    return e.repeat(times, *[1] * (e.ndim - 1))


def averaged(e: Tensor, copies: int) -> Tensor:
    """The mean over the copies of a batch that `repeated` makes."""
    return standing(lying(e).unflatten(0, (copies, -1)).mean(0), e)


def of_patches(synapse: Synapse, r: Tensor, u: Tensor) -> Tensor:
    """R u of every patch: R's rows are weights of this layer's kind."""
    return synapse.forward(r.reshape(r.shape[0] * r.shape[1], *synapse.weight_shape[1:]), u)


def decorrelated(r: Tensor, v: Tensor, rate: float) -> Tensor:
    """R after one step away from the correlations that are left in v = R u, (groups, samples, n)."""
    _, count, units = v.shape
    step = -rate / count
    together = (
        v.mT @ (v @ r * step) if count < units else (v.mT @ v * step) @ r
    )  # the order with less to multiply
    return torch.addcmul(together, r, 1 - step * v.square().sum(1).unsqueeze(-1))
