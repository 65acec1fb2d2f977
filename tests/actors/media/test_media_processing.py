"""Images and frames become the rows that transformers' processors make of them."""

from __future__ import annotations

import json
import random
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

from actorium.actors.errors import BadModel, InvalidRequest
from actorium.actors.media.decoding import ORIENTATION, in_rgb, upright
from actorium.actors.media.image_processor import (
    QWEN2,
    QWEN3,
    ImageProcessing,
    MediaProcessing,
    VideoProcessing,
    frame_size,
    image_size,
    read_processing,
    sampled_frames,
    with_kwargs,
)
from actorium.actors.media.media_jobs import patchify

QWEN2_5_VL = {
    "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2,
    "merge_size": 2, "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}
QWEN3_VL = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16,
    "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5], "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast"}
QWEN3_VL_VIDEO = QWEN3_VL | {"size": {"longest_edge": 25165824, "shortest_edge": 4096},
                             "video_processor_type": "Qwen3VLVideoProcessor"}
del QWEN3_VL_VIDEO["image_processor_type"]
MODES = ("RGB", "RGBA", "L", "P", "LA", "1", "CMYK", "I;16", "PA", "YCbCr", "F", "I")


def checkpoint(folder: Path, **files: dict[str, Any]) -> Path:
    for name, body in files.items():
        (folder / f"{name}.json").write_text(json.dumps(body))
    return folder


def drawn(rng: random.Random, mode: str, width: int, height: int) -> Image.Image:
    """An image of a mode with random pixels, of which some are transparent where it has such."""
    noise = np.frombuffer(rng.randbytes(width * height * 4), np.uint8).reshape(height, width, 4)
    if mode == "P":
        image = Image.fromarray(noise[..., :3].copy()).quantize(16)
        if rng.random() < 0.5:
            image.info["transparency"] = rng.randrange(16)
        return image
    if mode == "PA":
        return Image.fromarray(noise[..., :2].copy(), "LA").convert("PA")
    if mode == "I;16":
        return Image.fromarray(noise[..., :2].copy().view("<u2")[..., 0])
    if mode in ("F", "I"):
        return Image.fromarray((noise[..., 0].astype(int) * 2 - 100).astype("f4")).convert(mode)
    if mode in ("LA", "CMYK", "RGBA", "YCbCr"):
        return Image.fromarray(noise[..., :len(Image.new(mode, (1, 1)).getbands())].copy(), mode)
    return Image.fromarray(noise[..., :3].copy()).convert(mode)


def rows_of(image: Image.Image, p: ImageProcessing) -> tuple[Any, tuple[int, int, int]]:
    found = in_rgb(upright(image))
    high, wide = image_size(found.height, found.width, p)
    return patchify(np.asarray(found.resize((wide, high), p.resample))[None], p)


@pytest.mark.parametrize("config", [QWEN2_5_VL, QWEN3_VL], ids=["qwen2.5", "qwen3"])
def test_images_of_all_modes_are_equal_to_the_bit(tmp_path: Path, config: dict[str, Any]) -> None:
    rng = random.Random(len(config))
    ours = read_processing(checkpoint(tmp_path, preprocessor_config=config)).image
    theirs = Qwen2VLImageProcessorPil(
        **{k: v for k, v in config.items() if not k.startswith("processor")})
    for mode in MODES * 2:
        image = drawn(rng, mode, rng.randint(1, 120), rng.randint(1, 120))
        if rng.random() < 0.5:
            image.getexif()[ORIENTATION] = rng.randint(1, 8)
        expected = theirs(ImageOps.exif_transpose(image), return_tensors="np")
        rows, grid = rows_of(image, ours)
        assert [list(grid)] == expected["image_grid_thw"].tolist(), mode
        assert rows.dtype == np.float32 and np.array_equal(rows, expected["pixel_values"]), mode


@pytest.mark.parametrize("flags", [{"do_rescale": False}, {"do_normalize": False},
                                   {"resample": 2}, {"rescale_factor": 1 / 127.5}])
def test_switches_of_a_checkpoint_are_heeded(tmp_path: Path, flags: dict[str, Any]) -> None:
    ours = read_processing(checkpoint(tmp_path, preprocessor_config=QWEN3_VL | flags)).image
    image = drawn(random.Random(5), "RGB", 90, 61)
    expected = Qwen2VLImageProcessorPil(**{k: v for k, v in (QWEN3_VL | flags).items()
                                           if not k.startswith("processor")})(
        image, return_tensors="np")
    assert np.array_equal(rows_of(image, ours)[0], expected["pixel_values"])


def test_sizes_are_equal_over_drawn_images_and_bounds() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    rng = random.Random(7)
    for _ in range(3000):
        least = rng.choice([1, 56 * 56, 65536, rng.randint(1, 10**6)])
        most = least + rng.randint(0, 10**rng.randint(1, 8))
        p = ImageProcessing(patch_size=rng.choice([14, 16, 7]), merge_size=rng.choice([1, 2, 3]),
                            min_pixels=least, max_pixels=most)
        height, width = (int(10 ** rng.uniform(0, 4.5)) for _ in range(2))
        try:
            expected = smart_resize(height, width, p.factor, p.min_pixels, p.max_pixels)
        except ValueError:
            with pytest.raises(ValueError, match="200 times"):
                image_size(height, width, p)
        else:
            assert image_size(height, width, p) == expected


def test_sizes_of_qwen3_videos_are_equal() -> None:
    rng = random.Random(8)
    theirs = Qwen3VLVideoProcessor()
    for _ in range(1500):
        frames, cap = rng.randint(2, 300), rng.random() < 0.5
        height, width = (int(10 ** rng.uniform(0.5, 3.5)) for _ in range(2))
        least = rng.choice([4096, 128 * 32 * 32])
        most = least + int(10 ** rng.uniform(3, 8))
        p = VideoProcessing(family=QWEN3, patch_size=16, min_pixels=least, max_pixels=most,
                            cap_pixels_per_frame=cap, max_video_tokens=768)
        try:
            expected = theirs.get_num_of_video_patches(frames, height, width, {
                "size": {"shortest_edge": least, "longest_edge": most},
                "cap_pixels_per_frame": cap})
        except ValueError:
            with pytest.raises(ValueError):
                frame_size(frames, height, width, p)
        else:
            high, wide = frame_size(frames, height, width, p)
            assert -(-frames // 2) * (high // 16) * (wide // 16) == expected


@pytest.fixture(scope="module")
def qwen2_video() -> Any:
    """Qwen2VLVideoProcessor. Its module imports torchvision, of which sampling, bounds and patches
    use nothing: resizing is done by torch's own filter for bytes, as torchvision does."""
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2",
             "torchvision.transforms.v2.functional")
    missing = {name: types.ModuleType(name) for name in names if name not in sys.modules}
    for name, module in missing.items():
        parent, _, child = name.rpartition(".")
        sys.modules[name] = module
        if parent:
            setattr(sys.modules[parent], child, module)
    try:
        from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    finally:
        for name in missing:
            del sys.modules[name]
    return Qwen2VLVideoProcessor


def test_frames_are_sampled_as_both_processors_do(qwen2_video: Any) -> None:
    rng = random.Random(9)
    for _ in range(300):
        total, fps = rng.randint(1, 2500), rng.choice([23.976, 24.0, 25.0, 29.97, 30.0, 60.0, 1.0])
        bounds = {"min_frames": rng.randint(1, 8), "max_frames": rng.randint(8, 800)}
        wanted = {"num_frames": rng.randint(1, 400)} if rng.random() < 0.3 else {
            "fps": rng.choice([0.5, 1.0, 2.0, 3.7])}
        metadata = VideoMetadata(total_num_frames=total, fps=fps)
        for family, theirs in ((QWEN2, qwen2_video(do_sample_frames=True)),
                               (QWEN3, Qwen3VLVideoProcessor(**bounds))):
            p = VideoProcessing(family=family, **bounds, **wanted)
            try:
                more = bounds if family == QWEN2 else {}
                expected = theirs.sample_frames(metadata, **more, **wanted).tolist()
            except (ValueError, ZeroDivisionError, RuntimeError):
                with pytest.raises(ValueError):
                    sampled_frames(total, fps, p)
                continue
            if family == QWEN2 or len(expected) <= total:
                assert sampled_frames(total, fps, p) == expected, (family, total, fps, p)


def test_frames_without_a_rate_count_as_24_a_second() -> None:
    p = VideoProcessing(family=QWEN3)
    assert sampled_frames(240, None, p) == sampled_frames(240, 24.0, p)
    assert len(sampled_frames(240, None, p)) == 20


@pytest.mark.parametrize("family", [QWEN2, QWEN3])
@pytest.mark.parametrize("count", [2, 5])
def test_videos_become_the_rows_of_their_processor(qwen2_video: Any, family: str,
                                                   count: int) -> None:
    """To the bit behind the resizing. That is Pillow's here and torch's there: at most one level
    apart (and two in a few of a thousand), which `test_resized_frames_are_near` holds."""
    frames = np.random.default_rng(3).integers(0, 256, (count, 64, 96, 3), np.uint8)
    theirs = (qwen2_video if family == QWEN2 else Qwen3VLVideoProcessor)(
        patch_size=16, image_mean=[0.5, 0.4, 0.3], image_std=[0.5, 0.6, 0.7])
    p = VideoProcessing(family=family, patch_size=16, image_mean=(0.5, 0.4, 0.3),
                        image_std=(0.5, 0.6, 0.7))
    video = torch.from_numpy(frames).permute(0, 3, 1, 2)[None]
    mean, std, _ = theirs._fuse_mean_std_and_rescale_factor(
        True, p.image_mean, p.image_std, True, p.rescale_factor)
    scaled = (video.float() - mean[:, None, None]) / std[:, None, None]
    expected, *grid = theirs.patchify(scaled, 16, 2, 2)
    rows, ours = patchify(frames, p)
    assert list(ours) == grid == [-(-count // 2), 4, 6]
    assert np.array_equal(rows, expected[0].numpy())


def test_resized_frames_are_near() -> None:
    rng = np.random.default_rng(4)
    for high, wide in ((64, 96), (160, 32), (96, 96)):
        frame = rng.integers(0, 256, (77, 131, 3), np.uint8)
        ours = np.asarray(Image.fromarray(frame).resize((wide, high), 3), np.int64)
        theirs = torch.nn.functional.interpolate(
            torch.from_numpy(frame).permute(2, 0, 1)[None], (high, wide), mode="bicubic",
            antialias=True)[0].permute(1, 2, 0).numpy()
        assert np.abs(ours - theirs).max() <= 2
        assert (np.abs(ours - theirs) > 1).mean() < 1e-3


# --- configurations ------------------------------------------------------------------------------

def test_published_files_are_read(tmp_path: Path) -> None:
    found = read_processing(checkpoint(tmp_path, preprocessor_config=QWEN2_5_VL))
    assert (found.image.min_pixels, found.image.max_pixels) == (3136, 12845056)
    assert found.video.family == QWEN2 and found.video.max_pixels == 12845056
    (tmp_path / "b").mkdir()
    found = read_processing(checkpoint(tmp_path / "b", preprocessor_config=QWEN3_VL,
                                       video_preprocessor_config=QWEN3_VL_VIDEO))
    assert (found.image.factor, found.image.min_pixels) == (32, 65536)
    assert found.video.family == QWEN3 and found.video.max_pixels == 25165824
    assert found.video.image_mean == (0.5, 0.5, 0.5) and found.video.fps == 2.0


def test_the_nested_file_of_transformers_5_wins(tmp_path: Path) -> None:
    nested = {"image_processor": QWEN3_VL | {"patch_size": 8},
              "video_processor": {"max_frames": 60}, "processor_class": "Qwen3VLProcessor"}
    found = read_processing(checkpoint(tmp_path, preprocessor_config=QWEN3_VL,
                                       processor_config=nested))
    assert found.image.patch_size == 8
    assert (found.video.family, found.video.max_frames, found.video.patch_size) == (QWEN3, 60, 16)


@pytest.mark.parametrize("change, words", [
    ({"patch_size": 0}, "patch_size: must be a number between 1 and 128, got 0"),
    ({"patch_size": 14.5}, "patch_size: "),
    ({"image_std": [0.5, 0, 0.5]}, "image_std: must be three numbers"),
    ({"image_mean": [0.5]}, "image_mean: must be three numbers"),
    ({"min_pixels": 10**9}, "min_pixels: 1000000000 is above max_pixels"),
    ({"do_resize": False}, "do_resize: only true is supported"),
    ({"size": 224}, "size: must be an object"),
    ({"resample": "bicubic"}, "resample: must be a number between 0 and 5"),
    ({"image_processor_type": "CLIPImageProcessor"}, "image_processor_type: 'CLIPImageProcessor'"),
    ({"video_processor_type": ["x"]}, "video_processor_type: "),
])
def test_bad_fields_of_a_checkpoint_are_named(tmp_path: Path, change: dict[str, Any],
                                              words: str) -> None:
    with pytest.raises(BadModel, match="preprocessor_config.json: ") as error:
        read_processing(checkpoint(tmp_path, preprocessor_config=QWEN2_5_VL | change))
    assert words in error.value.message and error.value.param == words.partition(":")[0]


def test_a_checkpoint_without_or_with_broken_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="has none"):
        read_processing(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("[1]")
    with pytest.raises(BadModel, match="cannot be read"):
        read_processing(tmp_path)


PLAIN = MediaProcessing(ImageProcessing(), VideoProcessing())


def test_keywords_of_a_request_change_its_own_processing() -> None:
    found = with_kwargs(PLAIN, {"min_pixels": 100, "max_pixels": 5000, "fps": 1, "max_frames": 2},
                        10**6, 768)
    assert (found.image.min_pixels, found.image.max_pixels) == (100, 5000)
    assert (found.video.fps, found.video.max_frames, found.video.min_frames) == (1, 2, 2)
    assert found.video.max_pixels == 5000
    three = MediaProcessing(ImageProcessing(), VideoProcessing(family=QWEN3))
    found = with_kwargs(three, {"max_pixels": 5000, "num_frames": 9}, 10**6, 768)
    assert (found.image.max_pixels, found.video.max_pixels) == (5000, 28 * 28 * 768)
    assert found.video.num_frames == 9
    found = with_kwargs(three, {"size": {"shortest_edge": 5, "longest_edge": 200_000}}, 10**6, 768)
    assert found.image.max_pixels == found.video.max_pixels == 200_000
    found = with_kwargs(PLAIN, {"min_pixels": 28 * 28 * 768, "num_frames": 768})
    assert found.image.min_pixels == 28 * 28 * 768 and found.video.num_frames == 768
    for wrong in ({"min_pixels": 28 * 28 * 1281, "max_pixels": 28 * 28 * 1281},
                  {"num_frames": 769}):
        with pytest.raises(InvalidRequest, match="must not be above"):
            with_kwargs(PLAIN, wrong)
    assert with_kwargs(PLAIN, {}, 1, 1) == PLAIN, "what the checkpoint has is not cut"
    assert with_kwargs(PLAIN, {"max_pixels": None}, 1, 1) == PLAIN


@pytest.mark.parametrize("kwargs, field, words", [
    ({"max_pixels": 10**8}, "max_pixels", "must not be above"),
    ({"min_pixels": -1}, "min_pixels", "must be a number between"),
    ({"min_pixels": "big"}, "min_pixels", "must be a number"),
    ({"min_pixels": True}, "min_pixels", "must be a number"),
    ({"min_pixels": 10**6}, "min_pixels", "above"),
    ({"max_pixels": 4000.5}, "max_pixels", "int"),
    ({"fps": 0}, "fps", "must be a number between"),
    ({"fps": float("nan")}, "fps", "must be a number between"),
    ({"fps": 2, "num_frames": 4}, "num_frames", "not together with fps"),
    ({"max_frames": 10**6}, "max_frames", "must not be above 768"),
    ({"min_frames": 9, "max_frames": 3}, "min_frames", "above max_frames"),
    ({"size": [1]}, "size", "must be an object"),
    ({"size": {"shortest_edge": "x"}}, "size", "shortest_edge must be a whole number"),
    ({"patch_size": 1}, "patch_size", "is not known"),
    ({"cap_pixels_per_frame": 3}, "cap_pixels_per_frame", "bool"),
])
def test_bad_keywords_are_named(kwargs: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as error:
        with_kwargs(PLAIN, kwargs, 10**7, 768)
    assert error.value.param == f"mm_processor_kwargs.{field}"
    assert error.value.message.startswith(f"mm_processor_kwargs.{field}: ")
