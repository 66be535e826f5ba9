"""GPT-2 as transformers writes it, small: Conv1D layers, tied words, learned positions, a causal kernel."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Conv1D(nn.Module):
    """transformers': a linear layer whose weight is (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) * 0.3), nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        size_out = (*x.size()[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size_out)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = Conv1D(3 * width, width), Conv1D(width, width)
        self.c_fc, self.c_out = Conv1D(2 * width, width), Conv1D(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(self.ln_1(x)).split(x.shape[-1], -1)
        x = x + self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class GPT2(nn.Module):
    """Words to the logits of the next word, with the last one tied to the first."""

    def __init__(self, words: int = 7, width: int = 4, length: int = 5) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Block(width) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))[:, -1]
