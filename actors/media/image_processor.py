"""A checkpoint's image processor: its configuration, and the sizes and frames that follow from it.

Read as transformers 5 reads them: the nested `processor_config.json` first, then a video's own
`video_preprocessor_config.json`, then `preprocessor_config.json`. Of Qwen2-VL, Qwen2.5-VL and
Qwen3-VL, whose image processor is one and whose video processors are two. Sizes and frames are
theirs also in their rounding. No Pillow, no numpy.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from actorium.actors.errors import BadModel, InvalidRequest, shown

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
QWEN2, QWEN3 = "qwen2_vl", "qwen3_vl"
NESTED = "processor_config.json"
VIDEO_FILE = "video_preprocessor_config.json"
IMAGE_FILE = "preprocessor_config.json"
KWARGS = "mm_processor_kwargs"
LARGEST = 1 << 31
"""Largest count of pixels or frames that any field may name."""
MAX_RATIO = 200
"""Longest side over the shortest; transformers refuses more."""


class ImageProcessing(Struct, frozen=True, kw_only=True):
    """What is done to each image. The defaults are those of transformers' Qwen2VLImageProcessor."""

    patch_size: int = 14
    """Pixels of a patch's side."""
    temporal_patch_size: int = 2
    """Frames of a patch."""
    merge_size: int = 2
    """Patches of a side that the tower merges into one token."""
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    """Bounds of an image's pixels once it is resized."""
    resample: int = 3
    """Pillow's filter: 0 nearest, 1 Lanczos, 2 bilinear, 3 bicubic, 4 box, 5 Hamming."""
    rescale_factor: float = 1 / 255
    image_mean: tuple[float, float, float] = CLIP_MEAN
    image_std: tuple[float, float, float] = CLIP_STD
    do_rescale: bool = True
    do_normalize: bool = True

    @property
    def factor(self) -> int:
        """Pixels of a token's side: sizes are multiples of it."""
        return self.patch_size * self.merge_size


class VideoProcessing(ImageProcessing, frozen=True, kw_only=True):
    """What is done to each video. The defaults are those of Qwen2VLVideoProcessor, but for `fps`,
    which is that of qwen-vl-utils, since transformers leaves sampling to it."""

    family: str = QWEN2
    """qwen2_vl: the bounds hold for each frame; qwen3_vl: for all frames together."""
    min_pixels: int = 128 * 28 * 28
    max_pixels: int = 28 * 28 * 768
    fps: float = 2.0
    """Frames a second that are sampled."""
    num_frames: int | None = None
    """Frames that are sampled, instead of `fps`."""
    min_frames: int = 4
    max_frames: int = 768
    cap_pixels_per_frame: bool = False
    """Share a bound of all frames among them, as qwen-vl-utils does."""
    max_video_tokens: int = 128_000
    """Of that bound: tokens of all frames (qwen2_vl), or of each (qwen3_vl)."""


class MediaProcessing(Struct, frozen=True):
    """Both of a checkpoint."""

    image: ImageProcessing
    video: VideoProcessing


P = TypeVar("P", bound=ImageProcessing)

_IMAGE_TYPES = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
_VIDEO_TYPES = {"Qwen2VLVideoProcessor": QWEN2, "Qwen3VLVideoProcessor": QWEN3}
_QWEN3_VIDEO = {"patch_size": 16, "image_mean": (0.5,) * 3, "image_std": (0.5,) * 3,
                "min_pixels": 128 * 32 * 32, "max_pixels": 32 * 32 * 768, "max_video_tokens": 768}
"""The defaults of Qwen3VLVideoProcessor where they are others."""
_BOUNDS: dict[str, tuple[float, float]] = {
    "patch_size": (1, 128), "temporal_patch_size": (1, 16), "merge_size": (1, 16),
    "min_pixels": (1, LARGEST), "max_pixels": (1, LARGEST), "resample": (0, 5),
    "rescale_factor": (1e-6, 1.0), "fps": (1e-3, 1000.0), "num_frames": (1, LARGEST),
    "min_frames": (1, LARGEST), "max_frames": (1, LARGEST), "max_video_tokens": (1, LARGEST)}
_MUST_BE_TRUE = ("do_resize", "do_convert_rgb")
_REQUEST_IMAGE = ("min_pixels", "max_pixels")
_REQUEST_VIDEO = ("fps", "num_frames", "min_frames", "max_frames", "cap_pixels_per_frame")


def read_processing(folder: Path) -> MediaProcessing:
    """Reads a checkpoint's directory. Raises `BadModel` that names the file and the field."""
    nested = _read(folder, NESTED) or {}
    image_at, video_at = f"{NESTED}: image_processor", f"{NESTED}: video_processor"
    image, video = nested.get("image_processor"), nested.get("video_processor")
    if image is None:
        image_at, image = IMAGE_FILE, _read(folder, IMAGE_FILE)
    if video is None:
        video_at, video = VIDEO_FILE, _read(folder, VIDEO_FILE)
    if image is None:
        raise BadModel(f"{IMAGE_FILE}: the checkpoint has none, so that its images cannot be "
                       f"prepared", IMAGE_FILE)
    if video is None:
        video_at, video = image_at, image
    return MediaProcessing(_image(image, image_at), _video(video, video_at, nested))


def _read(folder: Path, name: str) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode((folder / name).read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadModel(f"{name}: cannot be read: {error}", name) from None


def _image(config: dict[str, Any], where: str) -> ImageProcessing:
    """Raises `BadModel`."""
    kind = config.get("image_processor_type", _IMAGE_TYPES[0])
    if kind not in _IMAGE_TYPES:
        raise BadModel(f"{where}: image_processor_type: {shown(kind)} is not supported; "
                       f"{_IMAGE_TYPES[0]} is", "image_processor_type")
    return _built(ImageProcessing, config, {}, where)


def _video(config: dict[str, Any], where: str, nested: dict[str, Any]) -> VideoProcessing:
    """Raises `BadModel`."""
    kind = config.get("video_processor_type")
    if kind is None:
        owner = str(config.get("processor_class") or nested.get("processor_class") or "")
        kind = f"Qwen{3 if owner.startswith('Qwen3') else 2}VLVideoProcessor"
    family = _VIDEO_TYPES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise BadModel(f"{where}: video_processor_type: {shown(kind)} is not supported; "
                       f"{' and '.join(_VIDEO_TYPES)} are", "video_processor_type")
    defaults = {"family": family} | (_QWEN3_VIDEO if family == QWEN3 else {})
    return _built(VideoProcessing, config, defaults, where)


def _built(kind: type[P], config: dict[str, Any], defaults: dict[str, Any], where: str) -> P:
    """The fields of a file over defaults. Raises `BadModel`."""
    values = dict(defaults)
    for name in _MUST_BE_TRUE:
        if config.get(name) not in (None, True):
            raise BadModel(f"{where}: {name}: only true is supported", name)
    try:
        values |= _sizes(config)
        for name in kind.__struct_fields__:
            if name != "family" and name not in _REQUEST_IMAGE and config.get(name) is not None:
                values[name] = config[name]
        return _checked(kind, values)
    except ValueError as error:
        field, _, what = str(error).partition(": ")
        raise BadModel(f"{where}: {field}: {what}", field) from None


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """min_pixels and max_pixels, given as such or in `size` (two ways). Raises `ValueError`."""
    size = config.get("size")
    if size is not None and not isinstance(size, dict):
        raise ValueError(f"size: must be an object with shortest_edge and longest_edge (in "
                         f"pixels of the whole image), got {shown(size)}")
    sizes: dict[str, Any] = {}
    for name, edge in zip(_REQUEST_IMAGE, ("shortest_edge", "longest_edge"), strict=True):
        for value in ((size or {}).get(name), (size or {}).get(edge), config.get(name)):
            if value is not None and value is not config.get(name) and type(value) is not int:
                raise ValueError(f"size: {edge} must be a whole number, got {shown(value)}")
            if value is not None:
                sizes[name] = value
    return sizes


def _checked(kind: type[P], values: Mapping[str, Any]) -> P:
    """Raises `ValueError`: "field: what is wrong"."""
    for name, value in values.items():
        low, high = _BOUNDS.get(name, (-math.inf, math.inf))
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        if name in _BOUNDS and not (numeric and low <= value <= high):
            raise ValueError(f"{name}: must be a number between {low:g} and {high:g}, "
                             f"got {shown(value)}")
        if name in ("image_mean", "image_std") and not _is_triple(value, name == "image_std"):
            raise ValueError(f"{name}: must be three numbers, got {shown(value)}")
    try:
        made = msgspec.convert(dict(values), kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        raise ValueError(f"{path.rstrip('`') or 'config'}: {text}") from None
    if made.min_pixels > made.max_pixels:
        raise ValueError(f"min_pixels: {made.min_pixels} is above max_pixels, {made.max_pixels}")
    if isinstance(made, VideoProcessing) and made.min_frames > made.max_frames:
        raise ValueError(f"min_frames: {made.min_frames} is above max_frames, {made.max_frames}")
    return made


def _is_triple(value: Any, positive: bool) -> bool:
    return isinstance(value, list | tuple) and len(value) == 3 and all(
        isinstance(number, int | float) and not isinstance(number, bool) and abs(number) < 1e3
        and (number > 1e-6 or not positive) for number in value)


def with_kwargs(processing: MediaProcessing, kwargs: Mapping[str, Any], max_pixels: int = 0,
                max_frames: int = 0, param: str = KWARGS) -> MediaProcessing:
    """The processing of one request.

    `size` (shortest_edge, longest_edge) holds for images and videos, as a flat keyword of
    transformers' processors does; min_pixels and max_pixels for images, and for each frame of a
    Qwen2-VL video (Qwen3-VL's video processor does not know them); fps, num_frames, min_frames,
    max_frames and cap_pixels_per_frame for videos. No bound may be raised above what the
    checkpoint itself has, or above `max_pixels` and `max_frames` where these are more: pixels of
    the smallest image are a request's to choose by min_pixels. Raises `InvalidRequest` that names
    the field below `param`.
    """
    known = ("size", *_REQUEST_IMAGE, *_REQUEST_VIDEO)
    for name in kwargs:
        if name not in known:
            raise InvalidRequest(f"{param}.{shown(name)[1:-1]}: is not known; known are "
                                 f"{', '.join(known)}", f"{param}.{shown(name)[1:-1]}")
    if kwargs.get("fps") is not None and kwargs.get("num_frames") is not None:
        raise InvalidRequest(f"{param}.num_frames: not together with fps", f"{param}.num_frames")
    try:
        shared_sizes = _sizes({"size": kwargs.get("size")})
        image_sizes = _sizes(kwargs)
        sampling = {name: kwargs[name] for name in _REQUEST_VIDEO if kwargs.get(name) is not None}
        if "fps" in sampling:
            sampling["num_frames"] = None
        if "max_frames" in sampling:  # a maximum that is lowered alone lowers the minimum
            sampling.setdefault("min_frames", min(processing.video.min_frames,
                                                  sampling["max_frames"]))
        image = _replaced(processing.image, image_sizes, max_pixels, max_frames)
        video_sizes = image_sizes if processing.video.family == QWEN2 else shared_sizes
        video = _replaced(processing.video, video_sizes | sampling, max_pixels, max_frames)
    except ValueError as error:
        field = str(error).partition(": ")[0]
        raise InvalidRequest(f"{param}.{error}", f"{param}.{field}") from None
    return MediaProcessing(image, video)


def _replaced(old: P, values: dict[str, Any], max_pixels: int, max_frames: int) -> P:
    """Raises `ValueError`."""
    plain = {name: value for name, value in values.items() if value is not None}
    if isinstance(lowered := plain.get("max_pixels"), int) and lowered >= 1:
        # A maximum that is lowered alone lowers the minimum.
        plain.setdefault("min_pixels", min(old.min_pixels, lowered))
        values = {**values, "min_pixels": plain["min_pixels"]}
    made = _checked(type(old), {name: getattr(old, name) for name in old.__struct_fields__
                                if name not in values and getattr(old, name) is not None} | plain)
    for name, most in (("min_pixels", max_pixels), ("max_pixels", max_pixels),
                       ("num_frames", max_frames), ("max_frames", max_frames)):
        limit = old.max_pixels if name == "min_pixels" else getattr(old, name, None) or 0
        if name == "num_frames" and isinstance(old, VideoProcessing):
            limit = max(limit, old.max_frames)
        most = max(most, limit)
        if name in plain and plain[name] > most:
            raise ValueError(f"{name}: must not be above {most}, got {plain[name]}")
    return made


def image_size(height: int, width: int, p: ImageProcessing) -> tuple[int, int]:
    """(height, width) to which an image is resized: multiples of `p.factor`, within the bounds of
    its pixels, with the ratio of the sides kept as far as that goes. Raises `ValueError` for sides
    that are not positive or whose ratio is above `MAX_RATIO`."""
    return _bounded(1, 1, height, width, p.factor, p.min_pixels, p.max_pixels)


def frame_size(frames: int, height: int, width: int, p: VideoProcessing) -> tuple[int, int]:
    """(height, width) to which the `frames` sampled frames of a video are resized. Raises
    `ValueError` as `image_size`, and for fewer frames than a patch has (Qwen3-VL)."""
    factor, least, most = p.factor, p.min_pixels, p.max_pixels
    if p.family != QWEN3:
        if p.cap_pixels_per_frame:
            share = int(p.max_video_tokens * factor * factor * 0.9) * p.temporal_patch_size
            most = max(min(most, share // frames), int(least * 1.05))
        return _bounded(1, 1, height, width, factor, least, most)
    if frames < p.temporal_patch_size:
        raise ValueError(f"has {frames} frames, and needs {p.temporal_patch_size}")
    if p.cap_pixels_per_frame:
        most = frames * max(min(p.max_video_tokens * factor * factor, most // frames),
                            int(least * 1.05))
    if 0 < height < factor or 0 < width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    rounded = round(frames / p.temporal_patch_size) * p.temporal_patch_size
    return _bounded(frames, rounded, height, width, factor, least, most)


def _bounded(frames: int, rounded: int, height: int, width: int, factor: int, least: int,
             most: int) -> tuple[int, int]:
    """`rounded`: the frames as far as they fill patches."""
    if height < 1 or width < 1:
        raise ValueError(f"is {width} x {height} pixels")
    if max(height, width) / min(height, width) > MAX_RATIO:
        raise ValueError(f"is {width} x {height} pixels: one side may be {MAX_RATIO} times as long "
                         "as the other")
    high, wide = round(height / factor) * factor, round(width / factor) * factor
    if rounded * high * wide > most:
        beta = math.sqrt((frames * height * width) / most)
        high = max(factor, math.floor(height / beta / factor) * factor)
        wide = max(factor, math.floor(width / beta / factor) * factor)
    elif rounded * high * wide < least:
        beta = math.sqrt(least / (frames * height * width))
        high = math.ceil(height * beta / factor) * factor
        wide = math.ceil(width * beta / factor) * factor
    return high, wide


def sampled_frames(total: int, fps: float | None, p: VideoProcessing) -> list[int]:
    """Which of `total` frames are taken, rising. fps: of the video; without it 24 is assumed, as
    Qwen3-VL's processor does. Raises `ValueError` if there are too few frames for a patch, or for
    `p.num_frames`."""
    fps = fps or 24.0
    if p.family == QWEN3:
        count = p.num_frames
        if count is None:
            count = min(max(int(total / fps * p.fps), p.min_frames), p.max_frames, total)
        return _spread(total, count)
    patch = p.temporal_patch_size
    if p.num_frames is not None:
        count = round(p.num_frames / patch) * patch
    else:
        most = min(p.max_frames, total) // patch * patch
        count = math.floor(min(max(total / fps * p.fps, p.min_frames), most, total) / patch) * patch
    if not 0 < count <= total:
        raise ValueError(f"has {total} frames, of which {count or patch} cannot be sampled")
    return _strided(total, count)


def _spread(total: int, count: int) -> list[int]:
    """`numpy.linspace(0, total - 1, count).round()`: from the first to the last."""
    if count <= 1:
        return [0][:total]
    step = (total - 1) / (count - 1)
    return [*(round(index * step) for index in range(count - 1)), total - 1]


def _strided(total: int, count: int) -> list[int]:
    """`torch.arange(0, total, total / count).int()`: in float32, like that one."""
    step = total / count
    return [int(_float32(index * step)) for index in range(math.ceil(total / step))]


def _float32(value: float) -> float:
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return float(rounded)
