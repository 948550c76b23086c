"""Modules that hand their attention to an object: one is told its module, the other only the tensors."""

import torch.nn.functional as F
from torch import nn


class ModuleProcessor:
    """Called as processor(attn, x)."""

    def __call__(self, attn, x):
        q, k, v = (part.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for part in attn.qkv(x).chunk(3, dim=-1))
        return attn.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class TensorProcessor:
    """Called as processor(q, k, v)."""

    def __call__(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class WithModule(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads, self.inner_dim = heads, dim
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.processor = ModuleProcessor()

    def forward(self, x):
        return x + self.processor(self, x)


class WithTensors(WithModule):
    def __init__(self, dim: int, heads: int):
        super().__init__(dim, heads)
        self.processor = TensorProcessor()

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return x + self.out(self.processor(q, k, v).transpose(1, 2).flatten(2))


class Processed(nn.Module):
    def __init__(self, dim: int = 64, heads: int = 2):
        super().__init__()
        self.layers = nn.Sequential(WithModule(dim, heads), WithTensors(dim, heads))

    def forward(self, x):
        return self.layers(x)
