"""One small network of each kind, with the dropout that it has in practice, and inputs for it.

torchvision's and timm's shapes are written by hand, since neither installs beside a torch without CUDA; those of
transformers, torch_geometric and peft are the libraries' own. Their import is slow and warns, so it waits until a
network is made.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.networks.layers import DropPath, Output

WORDS, LENGTH = 30, 5


class Kind(NamedTuple):
    """How a network is made, and what goes into it."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]


# --- written by hand --------------------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Dropout(0.1), nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(8, 2),
    )  # fmt: skip


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(0.2), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4),
        nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 2),
    )  # fmt: skip


class BasicBlock(nn.Module):
    """torchvision's, of ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn1, self.bn2, self.relu = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += shortcut
        return self.relu(out)


class ResNet(nn.Module):
    """torchvision's, with dropout before the head, as it is fine-tuned."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4)
        self.layer1, self.layer2 = BasicBlock(4, 4, 1), BasicBlock(4, 8, 2)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Sequential(nn.Dropout(0.3), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x)))))
        return self.fc(torch.flatten(self.avgpool(h), 1))


class Attention(nn.Module):
    """timm's, with its fused kernel."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn_drop, self.proj_drop = nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        p = self.attn_drop.p if self.training else 0.0
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=p)
        return self.proj_drop(self.proj(h.transpose(1, 2).reshape(n, t, d)))


class VitBlock(nn.Module):
    """timm's: attention and an MLP, each on a branch that is dropped now and then."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(width), Attention(width, 2), nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width), nn.Dropout(0.1)
        )
        self.drop_path = DropPath(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class VisionTransformer(nn.Module):
    """timm's: patches, a class token, a table of positions, blocks, a head on the token."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(1, width, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width) * 0.1)
        self.pos_embed = nn.Parameter(torch.randn(1, 5, width) * 0.1)
        self.pos_drop, self.blocks = nn.Dropout(0.1), nn.Sequential(VitBlock(width), VitBlock(width))
        self.norm, self.head_drop, self.head = nn.LayerNorm(width), nn.Dropout(0.1), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patch_embed(x).flatten(2).transpose(1, 2)
        h = self.pos_drop(torch.cat([self.cls_token.expand(h.shape[0], -1, -1), h], 1) + self.pos_embed)
        return self.head(self.head_drop(self.norm(self.blocks(h))[:, 0]))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    whole = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    parts = {"first": nn.Linear(3, 8), "encoder": whole, "drop": nn.Dropout(0.2), "last": nn.Linear(8, 2)}
    return Output(
        nn.ModuleDict(parts), lambda net, x: net["last"](net["drop"](net["encoder"](net["first"](x)).mean(1)))
    )


def recurrent(kind: type[nn.RNNBase]) -> nn.Module:
    parts = {"rnn": kind(3, 8, 2, batch_first=True, dropout=0.2), "drop": nn.Dropout(0.2), "last": nn.Linear(8, 2)}
    return Output(nn.ModuleDict(parts), lambda net, x: net["last"](net["drop"](net["rnn"](x)[0][:, -1])))


# --- the libraries' own -----------------------------------------------------------------------------------------------


def quiet_import(name: str) -> Any:
    """Import a library without the warnings of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return __import__(name, fromlist=["_"])


def bert() -> nn.Module:
    library = quiet_import("transformers")
    config = library.BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, num_labels=2, initializer_range=0.3,
    )  # fmt: skip
    return Output(library.BertForSequenceClassification(config), _read_logits)


def _read_logits(net: Any, x: Tensor) -> Tensor:
    return net(x).logits


def gpt2() -> nn.Module:
    library = quiet_import("transformers")
    config = library.GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
        initializer_range=0.3, use_cache=False,
    )  # fmt: skip
    return Output(library.GPT2LMHeadModel(config), lambda net, x: net(x).logits[:, -1, :2])


def t5() -> nn.Module:
    library = quiet_import("transformers")
    config = library.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_decoder_layers=1, num_heads=2, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    return Output(
        library.T5ForConditionalGeneration(config),
        lambda net, x: net(input_ids=x, decoder_input_ids=x[:, :1]).logits[:, -1, :2],
    )


def vit() -> nn.Module:
    library = quiet_import("transformers")
    config = library.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4,
        num_channels=1, num_labels=2, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, initializer_range=0.3,
    )  # fmt: skip
    return Output(library.ViTForImageClassification(config), _read_logits)


def lora() -> nn.Module:
    adapters = quiet_import("peft")
    net = bert()
    config = adapters.LoraConfig(r=2, lora_dropout=0.2, target_modules=["query", "value"], init_lora_weights=False)
    net.net = adapters.get_peft_model(net.net, config)
    return net


class Graph(nn.Module):
    """Two graph convolutions on a ring of nodes, the data points, as torch_geometric's examples write them."""

    def __init__(self, nodes: int = 6) -> None:
        super().__init__()
        layers = quiet_import("torch_geometric.nn")
        self.conv1, self.conv2 = layers.GCNConv(3, 8), layers.GCNConv(8, 2)
        ring = torch.arange(nodes)
        self.register_buffer(
            "edges", torch.cat([torch.stack([ring, ring.roll(1)]), torch.stack([ring.roll(1), ring])], 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(F.relu(self.conv1(x, self.edges)), 0.3, self.training)
        return self.conv2(h, self.edges)


def _rows(n: int) -> Tensor:
    return torch.randn(n, 3)


def _pictures(n: int) -> Tensor:
    return torch.randn(n, 1, 8, 8)


def _sequences(n: int) -> Tensor:
    return torch.randn(n, 4, 3)


def _texts(n: int) -> Tensor:
    return torch.randint(1, WORDS, (n, LENGTH))


ZOO: dict[str, Kind] = {
    "MLP": Kind(mlp, _rows),
    "CNN with BatchNorm": Kind(cnn, _pictures),
    "ResNet": Kind(ResNet, _pictures),
    "ViT with DropPath": Kind(VisionTransformer, _pictures),
    "nn.TransformerEncoder": Kind(encoder, _sequences),
    "LSTM": Kind(lambda: recurrent(nn.LSTM), _sequences),
    "GRU": Kind(lambda: recurrent(nn.GRU), _sequences),
    "BERT": Kind(bert, _texts),
    "GPT-2": Kind(gpt2, _texts),
    "T5": Kind(t5, _texts),
    "ViT": Kind(vit, _pictures),
    "LoRA on BERT": Kind(lora, _texts),
    "GCN": Kind(Graph, _rows),
}
