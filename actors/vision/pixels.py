"""Upright pixels in red, green and blue of any image that Pillow has decoded."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

ORIENTATION = 0x0112
"""The EXIF tag."""
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""Its values -> Pillow's `Transpose` that sets the image upright."""


def upright(image: Image) -> Image:
    """The image as its EXIF orientation asks for it: `ImageOps.exif_transpose`, but for EXIF data
    that cannot be read, which are as if they were not there."""
    from PIL.Image import Transpose

    try:
        turn = _TURNS.get(image.getexif().get(ORIENTATION, 1))
    except Exception:  # whatever a broken block makes of Pillow's reader
        return image
    return image if turn is None else image.transpose(Transpose(turn))


def in_rgb(image: Image) -> Image:
    """The image in mode RGB. What is transparent shows white, as transformers' `convert_to_rgb` has
    it; levels above 255 of modes with 16 or 32 bits are cut off there, as Pillow does."""
    from PIL import Image as pillow

    if "A" in image.getbands() or image.info.get("transparency") is not None:
        white = pillow.new("RGBA", image.size, (255, 255, 255, 255))
        return pillow.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")
