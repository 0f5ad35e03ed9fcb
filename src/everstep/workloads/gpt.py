"""A byte-level GPT in plain torch, of any size.

Shapes: ``B`` sequences in a batch, ``T`` bytes of context, ``C`` width, ``H`` heads,
``V`` vocabulary (256: one token per byte value).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from everstep.errors import OptionError

_INIT_STD = 0.02
_MLP_FACTOR = 4
_WIDTH_STEP = 32
_WIDE = 256  # from here on heads are 64 wide instead of 32
_ASPECT = 64  # width per layer of the published GPT-2 sizes
_ASPECT_MIN = 16
_ASPECT_MAX = 128
_CLOSE_ENOUGH = 0.02


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The size of a :class:`GPT`.

    Attributes:
        layers: transformer blocks, >= 1.
        width: ``C``, a multiple of ``heads``.
        heads: ``H``.
        context: ``T``, the longest sequence.
        vocab: ``V``.
        dropout: probability, in [0, 1).

    Raises:
        OptionError: for sizes that make no model.
    """

    layers: int
    width: int
    heads: int
    context: int
    vocab: int = 256
    dropout: float = 0.1

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context", "vocab"):
            if getattr(self, name) < 1:
                raise OptionError(f"GPTConfig.{name} must be at least 1, not {getattr(self, name)}")
        if self.width % self.heads:
            raise OptionError(
                f"GPTConfig.width {self.width} is not a multiple of heads {self.heads}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise OptionError(f"GPTConfig.dropout must be in [0, 1), not {self.dropout}")

    @property
    def params(self) -> int:
        """Parameters of the model, each counted once (the head shares the embedding's)."""
        block = 4 * self.width**2 + 2 * _MLP_FACTOR * self.width**2 + 2 * self.width
        embeddings = (self.vocab + self.context) * self.width
        return self.layers * block + embeddings + self.width


class GPT(nn.Module):
    """Pre-norm decoder without biases; the output head is tied to the token embedding.

    Dropout acts on the embeddings and on what each half of a block adds to the stream.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.head.weight = self.tokens.weight
        self._initialise()

    def forward(self, tokens: Tensor) -> Tensor:
        """Predicts the next byte at every position.

        Args:
            tokens: ``(B, T)`` int64, with T at most ``config.context``.

        Returns:
            Logits, ``(B, T, V)``.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _initialise(self) -> None:
        # GPT-2: the projections back into the residual stream shrink with the depth.
        residual_std = _INIT_STD / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            nn.init.normal_(parameter, std=residual_std if "out" in name else _INIT_STD)


class _Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(config.width, bias=False)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.attention_out = nn.Linear(config.width, config.width, bias=False)
        self.norm_mlp = nn.LayerNorm(config.width, bias=False)
        self.mlp_in = nn.Linear(config.width, _MLP_FACTOR * config.width, bias=False)
        self.mlp_out = nn.Linear(_MLP_FACTOR * config.width, config.width, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self._attention(self.norm_attention(x)))
        hidden = functional.gelu(self.mlp_in(self.norm_mlp(x)))
        out: Tensor = x + self.dropout(self.mlp_out(hidden))
        return out

    def _attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


def gpt_of(
    params: int, *, context: int = 128, dropout: float = 0.1, layers: int | None = None
) -> GPTConfig:
    """A configuration with about ``params`` parameters and the proportions of GPT-2.

    Among the sizes within 2 % of ``params`` the one whose width per layer is nearest to
    64 is taken; where none is that near, the nearest size.

    Args:
        layers: so many, however wide that makes them; None: as GPT-2's proportions want it.

    Raises:
        OptionError: when even the smallest model has more than twice ``params``.
    """
    found: list[tuple[float, float, GPTConfig]] = []
    width = _WIDTH_STEP
    while True:
        # Half the smallest depth allowed at this width already overshoots: wider ones do too.
        fewest = max(1, width // _ASPECT_MAX)
        most = max(1, width // _ASPECT_MIN)
        if layers is not None:
            fewest = most = layers
        if GPTConfig(fewest, width, 1, context).params > 2 * params:
            break
        for depth in range(fewest, most + 1):
            config = GPTConfig(depth, width, _heads_of(width), context=context, dropout=dropout)
            off = abs(config.params - params) / params
            aspect = abs(math.log(width / depth / _ASPECT))
            found.append((max(off, _CLOSE_ENOUGH), aspect, config))
        width += _WIDTH_STEP if width < _WIDE else 2 * _WIDTH_STEP
    if not found:
        raise OptionError(
            f"no GPT with a context of {context} has as few as {params} parameters",
            hint=f"the smallest has {GPTConfig(layers or 1, _WIDTH_STEP, 1, context).params}",
        )
    return min(found, key=lambda item: item[:2])[2]


def _heads_of(width: int) -> int:
    return width // (2 * _WIDTH_STEP if width >= _WIDE else _WIDTH_STEP)
