"""What a file is by its first bytes, whatever its name or its sender calls it."""

from __future__ import annotations

IMAGE_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif",
               "BMP": "image/bmp", "TIFF": "image/tiff"}
"""Formats that are read as images, by Pillow's names, and their media types."""
CONTAINERS = {"MP4": "video/mp4", "WEBM": "video/webm", "AVI": "video/x-msvideo"}
ANIMATED = ("GIF", "WEBP")
"""Image formats that are also read as videos."""
_OTHER_NAMES = {
    "image/jpg": "JPEG", "image/pjpeg": "JPEG", "image/x-png": "PNG", "image/x-ms-bmp": "BMP",
    "video/quicktime": "MP4", "video/x-m4v": "MP4", "video/x-matroska": "WEBM", "video/avi": "AVI"}
TYPES = {kind: name for name, kind in (IMAGE_TYPES | CONTAINERS).items()} | _OTHER_NAMES
"""Media type -> format."""
_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "PNG"), (b"\xff\xd8\xff", "JPEG"), (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"), (b"II*\0", "TIFF"), (b"MM\0*", "TIFF"), (b"\x1a\x45\xdf\xa3", "WEBM"),
    (b"%PDF", "PDF"), (b"%!", "PostScript"), (b"\xc5\xd0\xd3\xc6", "EPS"), (b"8BPS", "PSD"),
    (b"\0\0\1\0", "ICO"), (b"\0\0\0\x0cjP  ", "JPEG 2000"), (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"\xff\x0a", "JPEG XL"), (b"\0\0\0\x0cJXL ", "JPEG XL"), (b"\x1f\x8b", "gzip"),
    (b"PK\x03\x04", "ZIP"), (b"qoif", "QOI"), (b"DDS ", "DDS"), (b"\x01\xda", "SGI"),
    (b"BM", "BMP"))
HEAD = 1024
"""Bytes that are looked at."""


def sniffed(data: bytes) -> str:
    """A name of `IMAGE_TYPES` or `CONTAINERS`, or of a format that is not read; empty = unknown."""
    head = data[:HEAD]
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return name
    if head[:4] == b"RIFF":
        return {b"WEBP": "WEBP", b"AVI ": "AVI"}.get(head[8:12], "RIFF")
    if head[4:8] == b"ftyp":
        brand = head[8:12]
        return {b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIC", b"heix": "HEIC",
                b"mif1": "HEIC", b"msf1": "HEIC"}.get(brand, "MP4")
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith(b"<"):
        return "SVG" if b"<svg" in text else "XML or HTML"
    if text.startswith(b"#extm3u"):
        return "a playlist"
    return ""
