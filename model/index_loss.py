"""What an indexer learns from: its scores should rank entries as its layer's attention would weigh them.

Selection passes no gradient, so the scores get a loss of their own: the divergence of softmax(scores) from the
attention weights of the layer, summed over heads and normalised over the entries that the scores leave finite.
"""

from __future__ import annotations

import torch

from .cache import RecordFormat
from .ops.kv import decode, page_records
from .step import Rows


def attention_over_entries(
    q: torch.Tensor, latent: torch.Tensor, form: RecordFormat, rows: Rows, scores: torch.Tensor
) -> torch.Tensor:
    """Head-summed weights fp32 [T, n] over the entries with a finite score; a row sums to 1, or to 0 without any.

    q [T, H, d] rotated, latent [pages, rows, record], scores [T, n]. Dense, one product a request: for training only.
    """
    out = torch.zeros_like(scores)
    for request in rows.request.unique().tolist():
        at = (rows.request == request).nonzero().squeeze(1)
        keys = decode(page_records(latent, rows.page_table[request], 0), form).float()
        z = torch.matmul(q[at].float(), keys.T) * q.shape[-1] ** -0.5
        z = z.masked_fill(torch.isneginf(scores[at]).unsqueeze(1), float("-inf"))
        weights = torch.softmax(z, dim=-1).nan_to_num(0.0)
        out[at] = weights.sum(1) / q.shape[1]
    return out


def index_loss(
    scores: torch.Tensor, q: torch.Tensor, latent: torch.Tensor, form: RecordFormat, rows: Rows
) -> torch.Tensor:
    """Mean over valid rows of KL(attention || softmax(scores)), a scalar; the attention side is detached.

    scores fp32 [T, n], -inf where an entry is invisible or filtered out. Rows without any entry count as 0.
    """
    with torch.no_grad():
        target = attention_over_entries(q, latent, form, rows, scores)
    some = ~torch.isneginf(scores).all(-1, keepdim=True)
    log_probability = torch.log_softmax(torch.where(some, scores, 0.0), dim=-1)
    terms = torch.xlogy(target, target) - target * torch.where(target > 0, log_probability, 0.0)
    return terms.sum() / rows.valid.sum().clamp(min=1)
