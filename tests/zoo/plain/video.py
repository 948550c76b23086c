"""A video transformer in the manner of a research repository: self and cross attention through a helper of its package,
and a cross attention that derives from the self attention."""

import torch
from torch import nn

from .wan_attention import attention


class RMSNorm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class SelfAttention(nn.Module):
    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.dim, self.num_heads, self.head_dim = dim, num_heads, dim // num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = RMSNorm(dim), RMSNorm(dim)

    def forward(self, x, seq_lens):
        b, s, n, d = *x.shape[:2], self.num_heads, self.head_dim

        def qkv_fn(x):
            q, k, v = self.norm_q(self.q(x)), self.norm_k(self.k(x)), self.v(x)
            return q.view(b, s, n, d), k.view(b, s, n, d), v.view(b, s, n, d)

        q, k, v = qkv_fn(x)
        return self.o(attention(q, k, v, k_lens=seq_lens).flatten(2))


class CrossAttention(SelfAttention):
    def forward(self, x, context):
        b, n, d = x.shape[0], self.num_heads, self.head_dim
        q = self.norm_q(self.q(x)).view(b, -1, n, d)
        k = self.norm_k(self.k(context)).view(b, -1, n, d)
        v = self.v(context).view(b, -1, n, d)
        return self.o(attention(q, k, v).flatten(2))


class AttentionBlock(nn.Module):
    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))
        self.self_attn, self.cross_attn = SelfAttention(dim, num_heads), CrossAttention(dim, num_heads)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, seq_lens, context):
        x = x + self.self_attn(self.norm1(x), seq_lens)
        x = x + self.cross_attn(self.norm3(x), context)
        return x + self.ffn(self.norm2(x))


class VideoModel(nn.Module):
    def __init__(self, dim: int = 64, num_heads: int = 2, num_layers: int = 2):
        super().__init__()
        self.patch_embedding = nn.Conv3d(4, dim, (1, 2, 2), (1, 2, 2))
        self.blocks = nn.ModuleList(AttentionBlock(dim, num_heads) for _ in range(num_layers))
        self.head = nn.Linear(dim, 16)

    def forward(self, video, context, seq_lens):
        x = self.patch_embedding(video).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, seq_lens, context)
        return self.head(x)
