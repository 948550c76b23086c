"""A picture transformer of double and single blocks, whose blocks themselves call the attention function."""

import torch
from torch import nn

from .flux_math import attention, rope


def split_heads(qkv, num_heads):
    return qkv.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


class Stream(nn.Module):
    """One side of a double block."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)


class DoubleStreamBlock(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.num_heads, self.hidden_size = num_heads, hidden_size
        self.img, self.txt = Stream(hidden_size), Stream(hidden_size)

    def forward(self, img, txt, pe):
        sides = [split_heads(s.qkv(s.norm(x)), self.num_heads) for s, x in ((self.txt, txt), (self.img, img))]
        q, k, v = (torch.cat(parts, dim=2) for parts in zip(*sides, strict=True))
        txt_attn, img_attn = attention(q, k, v, pe=pe).split([txt.shape[1], img.shape[1]], dim=1)
        return img + self.img.proj(img_attn), txt + self.txt.proj(txt_attn)


class SingleStreamBlock(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.num_heads, self.hidden_size = num_heads, hidden_size
        self.stream = Stream(hidden_size)

    def forward(self, x, pe):
        q, k, v = split_heads(self.stream.qkv(self.stream.norm(x)), self.num_heads)
        return x + self.stream.proj(attention(q, k, v, pe=pe))


class PictureModel(nn.Module):
    def __init__(self, hidden_size: int = 64, num_heads: int = 2, depth: int = 2, depth_single: int = 2):
        super().__init__()
        self.head_dim = hidden_size // num_heads
        self.double_blocks = nn.ModuleList(DoubleStreamBlock(hidden_size, num_heads) for _ in range(depth))
        self.single_blocks = nn.ModuleList(SingleStreamBlock(hidden_size, num_heads) for _ in range(depth_single))
        self.final = nn.Linear(hidden_size, 16)

    def forward(self, img, txt):
        pe = rope(img.shape[1] + txt.shape[1], self.head_dim)
        for block in self.double_blocks:
            img, txt = block(img, txt, pe)
        x = torch.cat((txt, img), dim=1)
        for block in self.single_blocks:
            x = block(x, pe)
        return self.final(x[:, txt.shape[1] :])
