"""Perturbation: add noise to the weights or the neurons, and move in the directions that reduced the loss."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from apical.core.activation import Noise
from apical.core.learner import Claims, Learner, Update
from apical.core.losses import LossFunction
from apical.core.network import Params
from apical.core.synapse import Dense
from apical.core.validation import require_bool, require_positive, require_whole
from apical.core.views import broadcast_rows, from_memory_order, group_samples, reshape_in_memory_order, to_memory_order
from apical.errors import ApicalError, UnsupportedError

DRIVE = ".drive"
"""The noise on the drive of layer 2 is named `.drive2`. No module's name begins with a dot."""


class PerturbationRule(Learner):
    """The base of both rules: `sigma` is the size of the noise, `samples` the number of draws that are averaged."""

    FEEDBACK = "none: one number, the change of the loss, reaches every synapse"
    CLAIMS = Claims(c1=True, c2=True, c3=False)

    def set_shared_options(self, sigma: float, samples: int) -> None:
        """Check and keep the options that both rules have."""
        require_positive(sigma=sigma)
        require_whole(samples=samples)
        self.sigma, self.samples = float(sigma), samples

    def draw(self, x: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Check that σ is not lost in rounding, and draw the noise of the network's random modules."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        if self.sigma < torch.finfo(dtype).eps:
            raise ApicalError(
                f"sigma is {self.sigma:g}, which {dtype} rounds away: the loss would not change; a larger one, such as "
                f"sigma={4 * torch.finfo(dtype).eps:.1g}, works."
            )
        return super().draw(x, generator)


class WeightPerturbation(PerturbationRule):
    """All weights are perturbed at once, by one ξ ~ N(0, 1) for each weight, the same for the whole batch:

        ΔW = −ξ (L(W + σξ) − L(W − σξ)) / 2σ       L the mean loss of the batch

    averaged over `samples` draws of ξ. With `antithetic=False` the second pass is the unperturbed one, and the
    difference is (L(W + σξ) − L(W)) / σ: K + 1 passes for K samples in place of 2K, and a bias of order σ, not σ².

    Law: for small σ the mean over draws is `bp`'s gradient; the variance of each entry of one draw is
    ‖g‖² + g², g being that gradient over all weights, so its error grows with the number of weights.
    Without an unperturbed pass, the reported output is the mean over the perturbed passes, and the loss is of that mean.
    """

    NAME = "wp"
    TITLE = "Weight perturbation"
    SOURCE = "Werfel, Xie & Seung 2003, Learning curves for stochastic gradient descent in linear feedforward networks"
    PARALLEL = True

    def __init__(
        self,
        model: nn.Sequential,
        *,
        input_shape: tuple[int, ...] | None = None,
        loss: str | LossFunction = "cross_entropy",
        label_smoothing: float = 0.0,
        sigma: float = 1e-3,
        samples: int = 1,
        antithetic: bool = True,
    ) -> None:
        super().__init__(model, input_shape=input_shape, loss=loss, label_smoothing=label_smoothing)
        self.set_shared_options(sigma, samples)
        require_bool(antithetic=antithetic)
        self.antithetic = antithetic

    def draw(self, x: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Draw ξ for each weight that learns and each sample, by the weight's name."""
        noise, trainable = super().draw(x, generator), self.trainable
        for name, p in self.params().items():
            if name in trainable:
                shape = (self.samples, *p.shape)
                noise[name] = torch.randn(shape, dtype=x.dtype, device=x.device, generator=generator)
        return noise

    def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        trainable, sigma = self.trainable, self.sigma
        xi = {name: noise[name] for name in params if name in trainable}

        def run_perturbed(weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            output = self.network.predict({**params, **weights}, x, noise)
            return self.loss(output, y).mean(), output

        def perturb(w: Tensor, e: Tensor) -> Tensor:
            return add_and_subtract(w[None], e, sigma, self.samples) if self.antithetic else w + sigma * e

        losses, outputs = run_all_passes(run_perturbed, {name: perturb(params[name], e) for name, e in xi.items()})
        output = outputs.mean(0) if self.antithetic else self.network.predict(params, x, noise)
        loss = self.loss(output, y).mean()
        if self.antithetic:
            plus, minus = losses.chunk(2)
            slope = (plus - minus) / (2 * sigma)
        else:
            slope = (losses - loss) / sigma
        grads = {name: torch.tensordot(slope.to(e.dtype) / self.samples, e, dims=1) for name, e in xi.items()}
        return Update(grads, {}, loss, output)


class NodePerturbation(PerturbationRule):
    """Every neuron of every example is perturbed before its φ, by its own ξ ~ N(0, 1), in two passes at once:

        a_i± = W_i u_i± + b_i ± σξ_i,   u_{i+1}± = φ_i(a_i±)
        ΔW_i = −mean ξ_i (ℓ₊ − ℓ₋)/2σ · ū_iᵀ       ℓ each example's own loss, ū = (u₊ + u₋)/2

    averaged over `samples` draws. With `decorrelate=True` (Dalm et al. 2023) a layer receives R_i u_i in place of u_i.
    R_i is a buffer that starts as the identity and learns to remove correlations (`decorrelation_rate` ε):

        R ← R − ε (C − diag C) R,   C = ⟨(R u)(R u)ᵀ⟩,   u the mean over all passes

    In a convolution, as published, u is the patch under the kernel and C is taken over patches of all positions.
    The layer then computes W R u, so `learner(x)` gives the predictions; the plain model, which has only W, does not.

    Law: for small σ the mean over draws is `bp`'s gradient (of the network with weights W R, in W). A draw is
    noisy by the number of neurons, not of weights, and every example has its own.
    The reported output is the mean over the noisy passes, and the loss is of that mean.
    """

    NAME = "np"
    TITLE = "Node perturbation"
    SOURCE = (
        "Dalm, Offergeld, Ahmad & van Gerven 2023, Effective learning with node perturbation in deep neural networks"
    )

    def __init__(
        self,
        model: nn.Sequential,
        *,
        input_shape: tuple[int, ...] | None = None,
        loss: str | LossFunction = "cross_entropy",
        label_smoothing: float = 0.0,
        sigma: float = 0.01,
        samples: int = 1,
        decorrelate: bool = False,
        decorrelation_rate: float = 1e-3,
    ) -> None:
        super().__init__(model, input_shape=input_shape, loss=loss, label_smoothing=label_smoothing)
        self.set_shared_options(sigma, samples)
        require_positive(decorrelation_rate=decorrelation_rate)
        require_bool(decorrelate=decorrelate)
        self.decorrelate, self.decorrelation_rate = decorrelate, float(decorrelation_rate)
        self.MODEL_PREDICTS = not decorrelate  # type: ignore[misc]  # depends on the instance
        layers = range(len(self.network)) if decorrelate else ()
        self._decorrelation = {i: f"decorrelation_{i}" for i in layers}
        for i, name in self._decorrelation.items():
            w = self.forward_weights[i]
            identity = torch.eye(w[0].numel(), dtype=w.dtype, device=w.device)
            self.register_buffer(name, identity.repeat(self.network.layers[i].synapse.groups, 1, 1))

    @property
    def scheduled_buffers(self) -> frozenset[str]:
        """R, whose rate follows the schedule: W could not adapt to an R that changes after the end of W's own steps."""
        return frozenset(self._decorrelation.values())

    def compute_effective_weights(self, params: Params, state: Params, among: Iterable[int]) -> Params:
        """Return the weights that act on a layer's plain input: W R for the layers `among`, W for the others."""
        names = {i: self.network.layers[i].weight for i in among}
        products = {name: multiply_inputs(params[name], state[self._decorrelation[i]]) for i, name in names.items()}
        return {**params, **products}

    def predict(self, params: Params, state: Params, x: Tensor) -> Tensor:
        return self.network.predict(self.compute_effective_weights(params, state, self._decorrelation), x, {})

    def draw(self, x: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Draw ξ for each neuron, example and sample, by layer."""
        noise, drives = super().draw(x, generator), self.network.shapes(x.shape[1:]).drives
        for i in self.network.find_learning_layers(self.trainable):
            shape = (self.samples * x.shape[0], *drives[i])
            noise[f"{DRIVE}{i}"] = torch.randn(shape, dtype=x.dtype, device=x.device, generator=generator)
        return noise

    def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        trainable, passes = self.trainable, 2 * self.samples
        learning = self.network.find_learning_layers(trainable)
        # A batch has fewer rows than a dense layer has units, so R u costs less than W R. There are many more patches.
        dense = {i for i in self._decorrelation if isinstance(self.network.layers[i].synapse, Dense)}
        weights = self.compute_effective_weights(params, state, self._decorrelation.keys() - dense)
        u, layer_inputs, perturbations = self.network.prefix(x, noise), {}, {}
        for i, layer in enumerate(self.network.layers):
            u = u @ state[self._decorrelation[i]][0].mT if i in dense else u
            drive = layer.forward(weights, u)
            if i in learning:
                layer_inputs[i] = u if i == learning[0] else average_copies(u, 2)
                perturbations[i] = reshape_in_memory_order(noise[f"{DRIVE}{i}"], like=drive)
                drive = add_and_subtract(drive, perturbations[i], self.sigma, self.samples)
            if i == learning[0]:
                noise = {n: e if n.startswith(DRIVE) else repeat_batch(e, passes) for n, e in noise.items()}
            u = layer.neuron(drive, noise)
        plus, minus = self.loss(u, repeat_batch(y, passes)).chunk(2)
        slope = (plus - minus) / (2 * self.sigma)  # per example and sample
        grads: dict[str, Tensor] = {}
        new: dict[str, Tensor] = {}
        for i in learning:
            layer, xi = self.network.layers[i], perturbations[i]
            xi = xi * broadcast_rows(slope, xi)
            if i == learning[0]:  # nothing below was perturbed: all samples share one input
                xi = average_copies(xi, self.samples)
            grads |= layer.gradients(layer_inputs[i], xi, trainable, scale=1.0)
            if i in self._decorrelation and layer.weight in trainable:
                r, v = state[self._decorrelation[i]], layer_inputs[i]
                v = v if i == learning[0] else average_copies(v, self.samples)
                if i not in dense:
                    grads[layer.weight] = multiply_inputs(grads[layer.weight], r.mT)
                    # R u of every patch, by a convolution with R's rows as filters.
                    v = layer.synapse.forward(r.reshape(-1, *layer.synapse.weight_shape[1:]), v)
                v = group_samples(layer.synapse, v)
                new[self._decorrelation[i]] = update_decorrelation(r, v, self.decorrelation_rate)
        output = average_copies(u, passes)
        return Update(grads, new, self.loss(output, y).mean(), output)


def run_all_passes(
    run_perturbed: Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]], weights: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the losses and outputs of all passes, each with its own weights, run as one."""
    if torch.compiler.is_compiling() or any(map(torch._C._functorch.is_batchedtensor, weights.values())):
        return torch.vmap(run_perturbed)(weights)
    try:
        return torch.vmap(run_perturbed)(weights)
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        raise UnsupportedError(
            "wp makes all of its passes at once, which a module of this network does not take "
            f"({str(error).splitlines()[0]})."
        ) from error


def add_and_subtract(drive: Tensor, xi: Tensor, sigma: float, samples: int) -> Tensor:
    """Return a + σξ of all samples followed by a − σξ, in one operation: these are the largest tensors of a step.

    Weights and the first perturbed drive are shared by all samples. Later drives already consist of the two halves.
    """
    xi = xi.unflatten(0, (1, samples, -1))
    drive = drive.unflatten(0, (1, 1, -1) if len(drive) == xi.shape[2] else (2, samples, -1))
    shift = torch.linspace(sigma, -sigma, 2, dtype=xi.dtype, device=xi.device)
    return torch.addcmul(drive, xi, shift.view(2, *[1] * (xi.ndim - 1))).flatten(0, 2)


def repeat_batch(e: Tensor, times: int) -> Tensor:
    """Return copies of the whole batch, one after another."""
    return e.repeat(times, *[1] * (e.ndim - 1))


def average_copies(e: Tensor, copies: int) -> Tensor:
    """Return the mean over the copies of a batch that `repeat_batch` makes."""
    return from_memory_order(to_memory_order(e).unflatten(0, (copies, -1)).mean(0), e)


def multiply_inputs(w: Tensor, matrix: Tensor) -> Tensor:
    """Return W · M, with W seen as one row of weights per unit, and M (groups, fan-in, fan-in)."""
    return (w.reshape(matrix.shape[0], -1, matrix.shape[-1]) @ matrix).reshape(w.shape)


def update_decorrelation(r: Tensor, v: Tensor, rate: float) -> Tensor:
    """Return R after one step that reduces the correlations left in v = R u, (groups, samples, units)."""
    _, count, units = v.shape
    step = -rate / count
    # Multiply in the cheaper order.
    change = v.mT @ (v @ r * step) if count < units else (v.mT @ v * step) @ r
    return torch.addcmul(change, r, 1 - step * v.square().sum(1).unsqueeze(-1))
