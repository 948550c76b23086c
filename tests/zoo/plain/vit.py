"""A vision transformer: attention with normalised queries, and a switch that is read once, when a layer is made."""

import torch.nn.functional as F
from torch import nn

_FUSED = True


def use_fused_attn() -> bool:
    return _FUSED


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.num_heads, self.head_dim, self.fused_attn = num_heads, dim // num_heads, use_fused_attn()
        self.scale = self.head_dim**-0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.LayerNorm(self.head_dim)

    def forward(self, x, attn_mask=None):
        batch, tokens, dim = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        query, key = self.q_norm(query), self.k_norm(key)
        if self.fused_attn:
            x = F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, dropout_p=0.0)
        else:
            x = (query * self.scale @ key.transpose(-2, -1)).softmax(dim=-1) @ value
        return self.proj(x.transpose(1, 2).reshape(batch, tokens, dim))


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, num_heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, dim: int = 64, num_heads: int = 2, depth: int = 2):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 4, 4)
        self.blocks = nn.Sequential(*(Block(dim, num_heads) for _ in range(depth)))
        self.head = nn.Linear(dim, 10)

    def forward(self, picture):
        x = self.patch_embed(picture).flatten(2).transpose(1, 2)
        return self.head(self.blocks(x).mean(dim=1))
