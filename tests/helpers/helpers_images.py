"""Models that take images, as far as an engine without weights needs them; and images for them."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

from helpers_text import byte_level
from PIL import Image
from tokenizers import AddedToken

PADS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif part.type == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")
KINDS = {"2.5": ("Qwen2_5_VLForConditionalGeneration", "Qwen2VLVideoProcessor"),
         "3": ("Qwen3VLForConditionalGeneration", "Qwen3VLVideoProcessor")}
PATCH, MERGE = 4, 2
"""As the towers of `helpers_configs`."""


def write_text_side(path: Path, kind: str = "2.5", **config: object) -> Path:
    """Everything but weights: a tokenizer with the pads, a template, how images are prepared."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(pad, special=True) for pad in PADS])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(
        {"chat_template": TEMPLATE, "eos_token": "<eos>"}))
    (path / "generation_config.json").write_text("{}")
    image, video, start, end = (tokenizer.token_to_id(pad) for pad in PADS)
    whole = {"architectures": [KINDS[kind][0]], "vision_config": {},
             "text_config": {"vocab_size": tokenizer.get_vocab_size() + 8,
                             "max_position_embeddings": 4096,
                             "eos_token_id": tokenizer.token_to_id("<eos>")}}
    if (path / "config.json").exists():
        whole = json.loads((path / "config.json").read_text())
    whole |= {"image_token_id": image, "video_token_id": video, "vision_start_token_id": start,
              "vision_end_token_id": end, **config}
    (path / "config.json").write_text(json.dumps(whole))
    sizes = {"patch_size": PATCH, "temporal_patch_size": 2, "merge_size": MERGE,
             "min_pixels": 64, "max_pixels": 64 * 64}
    (path / "preprocessor_config.json").write_text(json.dumps(
        {"image_processor_type": "Qwen2VLImageProcessor", **sizes}))
    (path / "video_preprocessor_config.json").write_text(json.dumps(
        {"video_processor_type": KINDS[kind][1], **sizes,
         "max_pixels": 64 * 64 * (1 if kind == "2.5" else 16)}))
    return path


def picture(width: int = 32, height: int = 24, color: tuple[int, int, int] = (200, 30, 30),
            kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), color).save(out, kind)
    return out.getvalue()


def gif(frames: int = 6, width: int = 32, height: int = 24) -> bytes:
    """An animation of two frames a second."""
    out = io.BytesIO()
    images = [Image.new("RGB", (width, height), (40 * at % 256, 90, 10)) for at in range(frames)]
    images[0].save(out, "GIF", save_all=True, append_images=images[1:], duration=500)
    return out.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
