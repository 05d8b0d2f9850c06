"""Hyper-connection coefficients: one product over all streams, then Sinkhorn, all in fp32."""

from __future__ import annotations

import torch

from .linear import product


def coefficients(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    iterations: int,
    hc_eps: float,
    norm_eps: float,
    wide: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """streams [T, m, D] to pre [T, m], post [T, m], mix [T, m, m] fp32; mix[i, j]: from stream i into stream j.

    fn fp32 [m(m+2), m*D] (pre rows, post rows, mix rows), base [m(m+2)], scale [3]. The RMS over all streams divides
    after the product. `iterations` column and `iterations - 1` row normalisations follow the softmax.
    """
    m = streams.shape[1]
    flat = streams.flatten(1).float()
    mixes = product(flat, fn, wide) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    pre = torch.sigmoid(mixes[:, :m] * scale[0] + base[:m]) + hc_eps
    post = 2 * torch.sigmoid(mixes[:, m : 2 * m] * scale[1] + base[m : 2 * m])
    mix = (mixes[:, 2 * m :] * scale[2] + base[2 * m :]).unflatten(1, (m, m))
    mix = torch.softmax(mix, dim=2) + hc_eps
    mix = mix / (mix.sum(1, keepdim=True) + hc_eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(2, keepdim=True) + hc_eps)
        mix = mix / (mix.sum(1, keepdim=True) + hc_eps)
    return pre, post, mix
