"""Attention that cannot be reached by exchanging what a module calls by name, one class for each way."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

try:
    from flash_attn import flash_attn_func
except ImportError:
    flash_attn_func = None


def split(x):
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(32, 32)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class LocalImport(Base):
    def attend(self, q, k, v):
        from torch.nn.functional import scaled_dot_product_attention

        return scaled_dot_product_attention(q, k, v)

    def forward(self, x):
        return self.out(self.attend(split(x), split(x), split(x)).transpose(1, 2).flatten(2))


class ThroughSuper(Base):
    def attend(self, q, k, v):
        return super().attend(q, k, v)

    def forward(self, x):
        return self.out(self.attend(split(x), split(x), split(x)).transpose(1, 2).flatten(2))


class InAttribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.out, self.attend = nn.Linear(32, 32), F.scaled_dot_product_attention

    def forward(self, x):
        return self.out(self.attend(split(x), split(x), split(x)).transpose(1, 2).flatten(2))


class ThroughOps(nn.Module):
    def forward(self, x):
        return torch.ops.aten.scaled_dot_product_attention(split(x), split(x), split(x)).transpose(1, 2).flatten(2)


class DecoratedInC(nn.Module):
    @functools.lru_cache  # noqa: B019
    def forward(self, x):
        return F.scaled_dot_product_attention(split(x), split(x), split(x)).transpose(1, 2).flatten(2)


STEP = 0


class CountsInAGlobal(nn.Module):
    def forward(self, x):
        global STEP
        STEP += 1
        return F.scaled_dot_product_attention(split(x), split(x), split(x)).transpose(1, 2).flatten(2)


class WithFlash(nn.Module):
    def forward(self, x):
        x = x.unflatten(-1, (2, -1))
        return flash_attn_func(x, x, x).flatten(2)


class WithXformers(nn.Module):
    def forward(self, x):
        import xformers.ops

        x = x.unflatten(-1, (2, -1))
        return xformers.ops.memory_efficient_attention(x, x, x).flatten(2)


class WrittenOutAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(32, 32)

    def forward(self, x):
        return self.out((x @ x.transpose(-1, -2)).softmax(-1) @ x)


class FlashWithFallback(nn.Module):
    """Takes the package where it is installed, as many repositories do."""

    def forward(self, x):
        if flash_attn_func is not None:
            x = x.unflatten(-1, (2, -1))
            return flash_attn_func(x, x, x).flatten(2)
        return F.scaled_dot_product_attention(split(x), split(x), split(x)).transpose(1, 2).flatten(2)
