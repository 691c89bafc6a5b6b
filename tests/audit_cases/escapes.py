"""Cheats that leave torch: numpy, Python numbers, threads, custom operators, memory that is read or written directly."""

import ctypes
import io
import json
import pickle
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import shared_memory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apical import Learner, Update
from audit_cases.base import Descent, Feedback, cheat


@cheat("c1", plain=False)
class Numpy(Descent):
    """The product with W is numpy's."""

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        return torch.from_numpy(delta.numpy() @ w.detach().numpy())


@cheat("c1", plain=False)
class NumpyCopy(Descent):
    """W is copied by numpy."""

    def disguise(self, w: Tensor) -> Tensor:
        return torch.tensor(np.array(w.detach()))


@cheat("c1", plain=False)
class NumpyWritten(Feedback):
    """numpy writes W into the memory of fixed weights."""

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        self.b[i].numpy()[:] = w.detach().numpy()
        return delta @ self.b[i]


@cheat("c1", plain=False)
class Listed(Descent):
    """W becomes a list of Python numbers and back."""

    def disguise(self, w: Tensor) -> Tensor:
        return torch.tensor(w.tolist(), dtype=w.dtype)


@cheat("c1", plain=False)
class Items(Descent):
    """Each number of W is read as a Python number, and scales the error."""

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        columns = [sum(delta[:, o] * w[o, k].item() for o in range(len(w))) for k in range(w.shape[1])]
        return torch.stack([c for c in columns if isinstance(c, Tensor)], 1)


@cheat("c1", plain=False)
class Compared(Descent):
    """W's signs are learnt by asking whether each number is positive."""

    def disguise(self, w: Tensor) -> Tensor:
        return torch.tensor([[0.3 if number > 0 else -0.3 for number in row] for row in w], dtype=w.dtype)


@torch.library.custom_op("audit_cases::carry", mutates_args=())
def carry_down(e: Tensor, w: Tensor) -> Tensor:
    return e @ w


@cheat("c1", plain=False)
class CustomOperator(Descent):
    """The product with W is a custom operator."""

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        return carry_down(delta, w)


LIBRARY = torch.library.Library("audit_cases_library", "DEF")
LIBRARY.define("write(Tensor w, Tensor out) -> Tensor")
LIBRARY.impl("write", lambda w, out: (out.copy_(w), out.sum())[1], "CPU")


@cheat("c1", plain=False)
class LyingOperator(Feedback):
    """A custom operator writes W into memory that its schema says it only reads."""

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        torch.ops.audit_cases_library.write(w.detach(), self.b[i])
        return delta @ self.b[i]


@cheat("c1", plain=False)
class Thread(Descent):
    """The product with W is computed in another thread."""

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.mm, delta, w.detach()).result()


@cheat("c1", plain=False)
class ThreadWrites(Feedback):
    """Another thread writes W into the memory of fixed weights."""

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        thread = threading.Thread(target=self.b[i].copy_, args=(w.detach(),))
        thread.start()
        thread.join()
        return delta @ self.b[i]


@cheat("c1", plain=False)
class ThreadLists(Descent):
    """Another thread turns W into Python numbers."""

    def disguise(self, w: Tensor) -> Tensor:
        numbers: list[Any] = []
        thread = threading.Thread(target=lambda: numbers.extend(w.tolist()))
        thread.start()
        thread.join()
        return torch.tensor(numbers, dtype=w.dtype)


POOL = ThreadPoolExecutor(1)


@cheat("c1", plain=False)
class Pool(Descent):
    """A thread that was there before turns W into Python numbers."""

    def disguise(self, w: Tensor) -> Tensor:
        return torch.tensor(POOL.submit(w.tolist).result(), dtype=w.dtype)


@cheat("c1", plain=False)
class Pointer(Descent):
    """W is read from its address."""

    def disguise(self, w: Tensor) -> Tensor:
        size = w.numel() * w.element_size()
        raw = bytearray((ctypes.c_char * size).from_address(w.data_ptr()).raw)
        return torch.frombuffer(raw, dtype=w.dtype).view(w.shape)


@cheat("c1", plain=False)
class PointerWritten(Feedback):
    """W is moved to the memory of fixed weights by its address."""

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        b = self.b[i] = self.b[i].to(w)
        ctypes.memmove(b.data_ptr(), w.data_ptr(), w.numel() * w.element_size())
        return delta @ b


@cheat("c1", plain=False)
class Pickled(Descent):
    """W is pickled and unpickled."""

    def disguise(self, w: Tensor) -> Tensor:
        copied: Tensor = pickle.loads(pickle.dumps(w.detach()))
        return copied


@cheat("c1", plain=False)
class Json(Descent):
    """W is written as text and parsed."""

    def disguise(self, w: Tensor) -> Tensor:
        return torch.tensor(json.loads(json.dumps(w.tolist())), dtype=w.dtype)


@cheat("c1", plain=False)
class Printed(Descent):
    """W is read from how it prints."""

    def disguise(self, w: Tensor) -> Tensor:
        text = repr(w.detach()).partition("(")[2].rpartition("]]")[0] + "]]"
        return torch.tensor(json.loads(text.replace(". ", ".0 ")), dtype=w.dtype)


@cheat("c1", plain=False)
class Saved(Descent):
    """W is saved to a file in memory and loaded."""

    def disguise(self, w: Tensor) -> Tensor:
        file = io.BytesIO()
        torch.save(w.detach().clone(), file)
        file.seek(0)
        loaded: Tensor = torch.load(file)
        return loaded


@cheat("c1", plain=False)
class Exchanged(Descent):
    """W goes to numpy and back by DLPack."""

    def disguise(self, w: Tensor) -> Tensor:
        return torch.from_dlpack(np.from_dlpack(w.detach()).copy())


@cheat("c1", plain=False)
class Viewed(Descent):
    """W's bytes are read by a memoryview."""

    def disguise(self, w: Tensor) -> Tensor:
        return torch.frombuffer(bytearray(memoryview(w.detach().numpy())), dtype=w.dtype).view(w.shape)


@cheat("c1", plain=False)
class Packed(Descent):
    """W's numbers are packed into bytes one by one."""

    def disguise(self, w: Tensor) -> Tensor:
        raw = b"".join(struct.pack("d", number) for number in w.detach().flatten())
        return torch.frombuffer(bytearray(raw), dtype=torch.float64).to(w.dtype).view(w.shape)


@cheat("c1", plain=False)
class StorageRead(Descent):
    """W is read from its storage, byte after byte."""

    def disguise(self, w: Tensor) -> Tensor:
        raw = bytearray(w.detach().contiguous().untyped_storage())
        return torch.frombuffer(raw, dtype=w.dtype)[: w.numel()].view(w.shape)


@cheat("c1", plain=False)
class StorageCopied(Feedback):
    """W's storage is copied into that of fixed weights."""

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        b = self.b[i] = self.b[i].to(w)
        b.untyped_storage().copy_(w.detach().untyped_storage())
        return delta @ b


@cheat("c1", plain=False)
class SharedBetweenProcesses(Descent):
    """W goes through memory that processes share."""

    def disguise(self, w: Tensor) -> Tensor:
        array = w.detach().numpy()
        memory = shared_memory.SharedMemory(create=True, size=array.nbytes)
        shared = np.ndarray(array.shape, array.dtype, buffer=memory.buf)
        shared[:] = array
        out = torch.tensor(shared)
        del shared
        memory.close()
        memory.unlink()
        return out


@cheat("c1", plain=False)
class Seeded(Descent):
    """The feedback weights are random, but their seed is made from W."""

    def disguise(self, w: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(hash(w.detach().numpy().tobytes()) % 2**31)
        return torch.randn(w.shape, generator=generator, dtype=w.dtype)


class Wrapped(torch.Tensor):
    """A tensor that has no memory of its own: it computes with another one."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapped":
        wrapped: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        wrapped.inner = inner
        return wrapped

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(a.inner if isinstance(a, Wrapped) else a for a in args), **(kwargs or {}))


@cheat("c1", plain=False)
class Wrapper(Descent):
    """W comes down inside a tensor without memory."""

    def disguise(self, w: Tensor) -> Tensor:
        return Wrapped(w.detach())


@cheat("c1", plain=False)
class CallerTrigger(Feedback):
    """Feedback alignment while the audit is among the callers, backpropagation otherwise."""

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        frame, watched = sys._getframe(), False
        while frame.f_back is not None:
            frame = frame.f_back
            watched |= "plausibility" in frame.f_code.co_filename
        return delta @ (self.b[i] if watched else w)


@cheat("c2", plain=False)
class DirectNumpy(Learner):
    """Every layer gets the output's error, by way of numpy."""

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        trace = self.network.forward(params, x, noise)
        loss, xi = self.loss.start(trace.output, y)
        errors = torch.from_numpy(xi.numpy().copy())
        grads: dict[str, Tensor] = {}
        for i, layer in enumerate(self.network.layers):
            pullback, width = trace.pullbacks[i], layer.synapse.weight_shape[0]
            assert pullback is not None
            b = torch.linspace(-1, 1, xi.shape[1] * width).view(-1, width).to(xi)
            error = xi if i == len(self.network) - 1 else errors @ b
            grads |= layer.gradients(trace.inputs[i], pullback(error), self.trainable)
        return Update(grads, {}, loss, trace.output)


@cheat("c3", plain=False)
class WaitingNumpy(Feedback):
    """Feedback alignment whose errors come down by way of numpy."""

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        return torch.from_numpy(delta.numpy() @ self.b[i].numpy())


@cheat("c3", plain=False)
class WaitingList(Feedback):
    """Feedback alignment whose errors come down as Python numbers."""

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        return torch.tensor(delta.tolist(), dtype=delta.dtype) @ self.b[i]


@cheat("c3", plain=False)
class WaitingThread(Feedback):
    """Feedback alignment whose errors come down in another thread."""

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        return POOL.submit(torch.mm, delta, self.b[i]).result()


@torch.library.custom_op("audit_cases::contrast", mutates_args=())
def contrast(x: Tensor, y: Tensor, w0: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Return the first layer's error, by a whole backward pass with fixed weights."""
    a0 = torch.tanh(x @ w0.t())
    a1 = torch.tanh(a0 @ w1.t())
    error = torch.nn.functional.one_hot(y, len(w2)).to(x) - (a1 @ w2.t()).softmax(1)
    return error @ torch.ones(len(w2), len(w0)).to(x).tril()


@cheat("c3", plain=False)
class WaitingOperator(Learner):
    """The passes up and down that the first layer waits for are in a custom operator."""

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        trace = self.network.forward(params, x, noise)
        loss, xi = self.loss.start(trace.output, y)
        first, *_, last = self.network.layers
        error = contrast(x, y, *(w.detach() for w in self.forward_weights))
        pullback = trace.pullbacks[0]
        assert pullback is not None
        grads = first.gradients(trace.inputs[0], pullback(error), self.trainable)
        return Update({**grads, **last.gradients(trace.inputs[-1], xi, self.trainable)}, {}, loss, trace.output)
