"""Convolutional networks of the published sizes, in plain torch.

Shapes: ``B`` images or clips, 3 channels, 224 x 224 pixels (112 x 112 and ``T`` frames for clips);
all of them give ``(B, classes)`` logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

__all__ = ["VGG11", "AlexNet", "MNASNet", "ResNet3D18", "ResNet18"]


class AlexNet(nn.Module):
    """AlexNet in its single-tower form (Krizhevsky, arXiv 1404.5997): 61,100,840 parameters."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(inplace=True)),
            nn.MaxPool2d(3, stride=2),
            *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(inplace=True)),
            nn.MaxPool2d(3, stride=2),
            *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(inplace=True)),
            *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(inplace=True)),
            *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(inplace=True)),
            nn.MaxPool2d(3, stride=2),
            nn.AdaptiveAvgPool2d(6),
        )
        self.classifier = nn.Sequential(
            *(nn.Dropout(0.5), nn.Linear(256 * 36, 4096), nn.ReLU(inplace=True)),
            *(nn.Dropout(0.5), nn.Linear(4096, 4096), nn.ReLU(inplace=True)),
            nn.Linear(4096, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """``(B, 3, 224, 224)`` to ``(B, classes)``."""
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits


class VGG11(nn.Module):
    """VGG configuration A (Simonyan and Zisserman, arXiv 1409.1556): 132,863,336 parameters."""

    _WIDTHS = ((64,), (128,), (256, 256), (512, 512), (512, 512))

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for stage in self._WIDTHS:
            for width in stage:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7))
        self.classifier = nn.Sequential(
            *(nn.Linear(512 * 49, 4096), nn.ReLU(inplace=True), nn.Dropout(0.5)),
            *(nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(0.5)),
            nn.Linear(4096, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """``(B, 3, 224, 224)`` to ``(B, classes)``."""
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits


class _Residual(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(
        self,
        convolution: Callable[..., nn.Module],
        normalise: Callable[[int], nn.Module],
        channels: int,
        width: int,
        stride: int,
    ) -> None:
        super().__init__()
        self.body = nn.Sequential(
            convolution(channels, width, 3, stride=stride, padding=1, bias=False),
            *(normalise(width), nn.ReLU(inplace=True)),
            convolution(width, width, 3, padding=1, bias=False),
            normalise(width),
        )
        self.around: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.around = nn.Sequential(
                convolution(channels, width, 1, stride=stride, bias=False), normalise(width)
            )
        self.out = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.body(x) + self.around(x))
        return out


def _stages(
    convolution: Callable[..., nn.Module], normalise: Callable[[int], nn.Module]
) -> nn.Module:
    """Four stages of two residual blocks; each but the first halves the resolution."""
    blocks = []
    channels = 64
    for width in (64, 128, 256, 512):
        stride = 1 if width == channels else 2
        blocks.append(_Residual(convolution, normalise, channels, width, stride))
        blocks.append(_Residual(convolution, normalise, width, width, 1))
        channels = width
    return nn.Sequential(*blocks)


class ResNet18(nn.Module):
    """ResNet-18 (He et al., arXiv 1512.03385): 11,689,512 parameters."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
            *(nn.BatchNorm2d(64), nn.ReLU(inplace=True)),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.stages = _stages(nn.Conv2d, nn.BatchNorm2d)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(512, classes)

    def forward(self, images: Tensor) -> Tensor:
        """``(B, 3, 224, 224)`` to ``(B, classes)``."""
        logits: Tensor = self.classifier(self.pool(self.stages(self.stem(images))).flatten(1))
        return logits


class ResNet3D18(nn.Module):
    """R3D-18, 3 x 3 x 3 throughout (Tran et al., arXiv 1711.11248): 33,371,472 parameters."""

    def __init__(self, classes: int = 400) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv3d(3, 64, (3, 7, 7), stride=(1, 2, 2), padding=(1, 3, 3), bias=False),
            *(nn.BatchNorm3d(64), nn.ReLU(inplace=True)),
        )
        self.stages = _stages(nn.Conv3d, nn.BatchNorm3d)
        self.pool = nn.AdaptiveAvgPool3d(1)
        self.classifier = nn.Linear(512, classes)

    def forward(self, clips: Tensor) -> Tensor:
        """``(B, 3, T, 112, 112)`` to ``(B, classes)``."""
        logits: Tensor = self.classifier(self.pool(self.stages(self.stem(clips))).flatten(1))
        return logits


class _Inverted(nn.Module):
    """Widen, one filter a channel, narrow; around it where shapes allow."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int, factor: int) -> None:
        super().__init__()
        wide = channels * factor
        self.body = nn.Sequential(
            *(nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide)),
            nn.ReLU(inplace=True),
            nn.Conv2d(wide, wide, kernel, stride, kernel // 2, groups=wide, bias=False),
            *(nn.BatchNorm2d(wide), nn.ReLU(inplace=True)),
            *(nn.Conv2d(wide, out, 1, bias=False), nn.BatchNorm2d(out)),
        )
        self.around = channels == out and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out + x if self.around else out


class MNASNet(nn.Module):
    """MNASNet-B1 of half the width (Tan et al., arXiv 1807.11626): 2,218,512 parameters."""

    # out, kernel, stride, factor, blocks
    _STAGES = (
        (16, 3, 2, 3, 3),
        (24, 5, 2, 3, 3),
        (40, 5, 2, 6, 3),
        (48, 3, 1, 6, 2),
        (96, 5, 2, 6, 4),
        (160, 3, 1, 6, 1),
    )

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            *_normalised(nn.Conv2d(3, 16, 3, 2, 1, bias=False)),
            *_normalised(nn.Conv2d(16, 16, 3, 1, 1, groups=16, bias=False)),
            *(nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8)),
        ]
        channels = 8
        for out, kernel, stride, factor, blocks in self._STAGES:
            for number in range(blocks):
                first = number == 0
                layers.append(_Inverted(channels, out, kernel, stride if first else 1, factor))
                channels = out
        layers += _normalised(nn.Conv2d(channels, 1280, 1, bias=False))
        self.layers = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))

    def forward(self, images: Tensor) -> Tensor:
        """``(B, 3, 224, 224)`` to ``(B, classes)``."""
        logits: Tensor = self.classifier(self.layers(images).mean((2, 3)))
        return logits


def _normalised(convolution: nn.Conv2d) -> Sequence[nn.Module]:
    return convolution, nn.BatchNorm2d(convolution.out_channels), nn.ReLU(inplace=True)
