"""`nn.MultiheadAttention` with wired projections. Attention itself is between activities and has no weights."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from apical.core.wiring import Weights, Wired, read_weights

Mask = Tensor | None


class WiredAttention(Wired):
    """`nn.MultiheadAttention`: each projection is a product with weights, and softmax(Q Kᵀ) V is exact."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Mask = None,
        need_weights: bool = True,
        attn_mask: Mask = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        module: Any = self
        options = key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        if self.runs_plainly:
            return super().forward(query, key, value, *options)  # type: ignore[no-any-return, misc]
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is a hint on attn_mask, which must be given, too.")
        is_batched, dtype = query.dim() == 3, query.dtype
        if not is_batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        q, k, v = _project(module, query, key, value, is_batched)
        if module.bias_k is not None:
            k = torch.cat([k, module.bias_k.to(k.dtype).expand(len(k), 1, -1)], 1)
            v = torch.cat([v, module.bias_v.to(v.dtype).expand(len(v), 1, -1)], 1)
        if module.add_zero_attn:
            k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
        heads = module.num_heads
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
        uses_hint = is_causal and key_padding_mask is None and not need_weights
        mask = None if uses_hint else _merge_masks(attn_mask, key_padding_mask, len(q), heads, k.shape[2], dtype)
        dropout = module.dropout if self.training else 0.0
        scores: Tensor | None = None
        if need_weights:
            logits = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
            scores = (logits if mask is None else logits + mask).softmax(-1)
            scores = F.dropout(scores, dropout) if dropout else scores
            out = scores @ v
        else:
            mask = None if mask is None else mask.to(q.dtype)
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout, uses_hint)
        # Time first in memory, as torch has it, so that a later dropout drops the same values.
        out = module.out_proj(out.permute(2, 0, 1, 3).flatten(2))
        if scores is not None and average_attn_weights:
            scores = scores.mean(1)
        if not is_batched:
            return out.squeeze(1), None if scores is None else scores.squeeze(0)
        return out.transpose(0, 1) if module.batch_first else out, scores


def _project(module: Any, query: Tensor, key: Tensor, value: Tensor, is_batched: bool) -> list[Tensor]:
    """Return Q, K and V as (batch, time, features), with as few products as the inputs that are the same allow."""
    q, k, v = (_put_batch_first(t, is_batched, module.batch_first) for t in (query, key, value))
    bias, size = module.in_proj_bias, module.embed_dim
    if not module._qkv_same_embed_dim:
        biases = [None] * 3 if bias is None else bias.chunk(3)
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        return [_multiply(module, *each) for each in zip(names, (q, k, v), biases, strict=True)]
    name = "in_proj_weight"
    if query is key is value:
        return list(_multiply(module, name, q, bias).chunk(3, -1))
    if key is value:
        return [_multiply(module, name, q, bias, 0, size), *_multiply(module, name, k, bias, size, None).chunk(2, -1)]
    return [_multiply(module, name, t, bias, i * size, (i + 1) * size) for i, t in enumerate((q, k, v))]


def _multiply(
    module: Any, name: str, a: Tensor, bias: Tensor | None, start: int | None = None, stop: int | None = None
) -> Tensor:
    """Return the product of an activity with the rows `start` to `stop` of the weights."""
    weights = read_weights(module, name, a)
    if start is None:
        return weights.linear(a, bias)
    rows: Weights = weights.map(lambda w: w[start:stop])
    return rows.linear(a, None if bias is None else bias[start:stop])


def _put_batch_first(t: Tensor, is_batched: bool, batch_first: bool) -> Tensor:
    if not is_batched:
        return t.unsqueeze(0)
    return t if batch_first else t.transpose(0, 1)


def _merge_masks(mask: Mask, padding: Mask, batch: int, heads: int, keys: int, dtype: torch.dtype) -> Mask:
    """Return the sum of both masks as (batch, heads, queries, keys), where −∞ forbids; added keys are allowed."""
    if mask is not None:
        mask = _to_float(mask, dtype)
        mask = mask.unflatten(0, (batch, heads)) if mask.dim() == 3 else mask
        mask = F.pad(mask, (0, keys - mask.shape[-1]))
    if padding is not None:
        padding = _to_float(padding, dtype)[:, None, None, :]
        padding = F.pad(padding, (0, keys - padding.shape[-1]))
    if mask is None or padding is None:
        return padding if mask is None else mask
    return mask + padding


def _to_float(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)
