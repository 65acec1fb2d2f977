"""The shape of a vision tower: what turns images and frames into rows that a decoder takes in the
place of embeddings. Plain numbers of `vision_config`; nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VisionShape:
    """A vision transformer over patches, whose last part merges squares of them.

    Two kinds are known. Qwen2.5-VL (arXiv 2502.13923): RMS norms, gated MLPs, attention in windows
    but for some blocks. Qwen3-VL (arXiv 2511.21631): layer norms, plain MLPs, learned positions
    beside the rotary ones, and DeepStack.
    """

    depth: int
    hidden: int
    intermediate: int
    heads: int
    patch: int
    """Pixels of a patch's side."""
    frames: int
    """In a patch: a still image is repeated."""
    merge: int
    """A square of so many by so many patches becomes one row of the output."""
    out_hidden: int
    """Width of the output: the decoder's."""
    image_token: int
    """Id of the placeholders of an image, one for each row of the output."""
    video_token: int
    channels: int = 3
    theta: float = 10000.0
    """Of the rotary positions, which are those of rows and of columns."""
    gated: bool = False
    """Qwen2.5-VL's blocks; else Qwen3-VL's."""
    window: int = 0
    """Patches of a window's side, a multiple of `merge`; 0: all blocks attend to the whole frame.
    """
    full: tuple[int, ...] = ()
    """Blocks without windows, where others have them."""
    positions: int = 0
    """Side of the square of learned positions, which is stretched over every frame; 0: none."""
    deepstack: tuple[int, ...] = ()
    """Blocks behind which a merger of its own makes rows that are added behind the decoder's first
    layers, the first block's behind the first layer."""
    tokens_per_second: int = 0
    """How far apart, in positions of time, a video's frames of a second are; 0: timestamps in the
    text tell frames apart, and each is an image by itself."""

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    @property
    def pixels(self) -> int:
        """Numbers of a patch: channels, frames, rows and columns, in this order."""
        return self.channels * self.frames * self.patch**2

    @property
    def merged(self) -> int:
        """Width of the patches that become one row."""
        return self.hidden * self.merge**2
