"""Run the trainer with blocks of different widths."""

import sys
from dataclasses import replace

from instrumented_trainer import __main__ as trainer, models
from instrumented_trainer.model import Decoder, FeedForward, ModelShape

WIDTHS = (0.5, 2.0, 0.5, 1.0, 0.5, 2.0)
"""The widths of the feed-forward of each block, relative to the preset's."""


class UnevenDecoder(Decoder):
    """A decoder whose feed-forwards have the widths above, in order."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        for at, layer in enumerate(self.layers):
            width = round(shape.ffn_dim * WIDTHS[at % len(WIDTHS)])
            layer.ffn = FeedForward(replace(shape, ffn_dim=width))


if __name__ == "__main__":
    models.Decoder = UnevenDecoder
    sys.exit(trainer.main())
