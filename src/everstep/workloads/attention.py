"""Networks of attention of the published sizes, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["BERT", "SmallTransformer", "VisionTransformer"]


class BERT(nn.Module):
    """The encoder of RoBERTa base (Liu et al., arXiv 1907.11692): 124,054,272 parameters.

    Args:
        context: longest sequence; two more positions are there for padding.
    """

    def __init__(self, vocabulary: int = 50_265, context: int = 512) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, 768, padding_idx=1)
        self.positions = nn.Embedding(context + 2, 768, padding_idx=1)
        self.norm = nn.LayerNorm(768)
        self.dropout = nn.Dropout(0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(768, 12, 3072, 0.1, "gelu", batch_first=True)
            for _ in range(12)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """``(B, T)`` int64 to features ``(B, T, 768)``."""
        places = torch.arange(2, tokens.shape[1] + 2, device=tokens.device)
        x: Tensor = self.dropout(self.norm(self.tokens(tokens) + self.positions(places)))
        for layer in self.layers:
            x = layer(x)
        return x


class VisionTransformer(nn.Module):
    """ViT-B/16 (Dosovitskiy et al., arXiv 2010.11929): 86,567,656 parameters."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 768, 16, stride=16)
        self.first = nn.Parameter(torch.zeros(1, 1, 768))
        self.positions = nn.Parameter(torch.empty(1, 197, 768).normal_(std=0.02))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                768, 12, 3072, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(12)
        )
        self.norm = nn.LayerNorm(768)
        self.classifier = nn.Linear(768, classes)

    def forward(self, images: Tensor) -> Tensor:
        """``(B, 3, 224, 224)`` to ``(B, classes)``."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.classifier(self.norm(x)[:, 0])
        return logits


class SmallTransformer(nn.Module):
    """One encoder and one decoder layer with a single head, of torch's default widths (512 and
    2048): 7,358,464 parameters."""

    def __init__(self) -> None:
        super().__init__()
        encoder = nn.TransformerEncoder(  # as nn.Transformer makes it, without its warning
            nn.TransformerEncoderLayer(512, 1), 1, nn.LayerNorm(512), enable_nested_tensor=False
        )
        self.layers = nn.Transformer(nhead=1, num_decoder_layers=1, custom_encoder=encoder)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """``(S, B, 512)`` and ``(T, B, 512)`` to ``(T, B, 512)``."""
        out: Tensor = self.layers(source, target)
        return out
