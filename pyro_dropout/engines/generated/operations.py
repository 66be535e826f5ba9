"""Operations of torch by what becomes of them in plain C, besides those with a formula for each element."""

import torch

aten = torch.ops.aten

VIEWS = {
    *(aten.detach.default, aten.alias.default, aten.view.default, aten._unsafe_view.default, aten.expand.default),
    *(aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.select.int),
    *(aten.t.default, aten.transpose.int, aten.permute.default, aten.slice.Tensor, aten.diagonal.default),
    *(aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default),
}
FILLS = {
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), 0.0),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), 1.0),
}
VALUES = {aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2, aten.scalar_tensor.default: 0}
SUMS = {aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim}
ANY = {aten.any.default, aten.any.dim, aten.any.dims}
DRAWS = {
    aten.rand.default: "uniform_",
    aten.randn.default: "normal_",
    aten.rand_like.default: "uniform_",
    aten.randn_like.default: "normal_",
}
PRODUCTS = {
    aten.mm.default: "mm",
    aten.addmm.default: "addmm",
    aten.bmm.default: "bmm",
    aten.baddbmm.default: "baddbmm",
}
