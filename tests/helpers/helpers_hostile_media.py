"""Files that nobody sends in good faith, made by code from a seed."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Iterator

from PIL import Image, PngImagePlugin

SAVED = {"PNG": {}, "JPEG": {"quality": 80}, "WEBP": {"lossless": True}, "GIF": {}, "BMP": {},
         "TIFF": {"compression": "tiff_lzw"}}


def noise(rng: random.Random, width: int = 40, height: int = 30) -> Image.Image:
    return Image.frombytes("RGB", (width, height), rng.randbytes(width * height * 3))


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **{**SAVED.get(kind, {}), **options})
    return out.getvalue()


def animation(rng: random.Random, kind: str, frames: int, size: tuple[int, int] = (40, 30),
              duration: int = 100) -> bytes:
    images = [noise(rng, *size) for _ in range(frames)]
    return saved(images[0], kind, save_all=True, append_images=images[1:], duration=duration)


def chunk(kind: bytes, body: bytes, length: int | None = None, crc: int | None = None) -> bytes:
    """A PNG chunk, whose length and checksum may lie."""
    return (struct.pack(">I", len(body) if length is None else length) + kind + body
            + struct.pack(">I", zlib.crc32(kind + body) if crc is None else crc))


def png(width: int, height: int, *chunks: bytes, depth: int = 8, color: int = 2,
        data: bytes = b"", interlace: int = 0) -> bytes:
    """A PNG with any header; `chunks` stand before its data."""
    header = struct.pack(">IIBBBBB", width & 0xFFFFFFFF, height & 0xFFFFFFFF, depth, color, 0, 0,
                         interlace)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(chunks)
            + chunk(b"IDAT", data or zlib.compress(bytes(1000))) + chunk(b"IEND", b""))


def jpeg_sized(rng: random.Random, width: int, height: int) -> bytes:
    """A JPEG whose frame header names another size than its data has."""
    data = bytearray(saved(noise(rng), "JPEG"))
    at = data.index(b"\xff\xc0")
    data[at + 5:at + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def tiff(*entries: tuple[int, int, int, int], order: str = "<", following: int = 0) -> bytes:
    """A TIFF of one directory with these (tag, type, count, value) entries."""
    head = struct.pack(order + "2sHI", b"II" if order == "<" else b"MM", 42, 8)
    body = struct.pack(order + "H", len(entries)) + b"".join(
        struct.pack(order + "HHII", *entry) for entry in entries)
    return head + body + struct.pack(order + "I", following) + bytes(64)


def tiff_image(width: int, height: int, *more: tuple[int, int, int, int],
               compression: int = 1) -> bytes:
    return tiff((256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 8), (259, 3, 1, compression),
                (262, 3, 1, 1), (273, 4, 1, 8), (277, 3, 1, 1), (278, 4, 1, height),
                (279, 4, 1, 64), *more)


def webp_canvas(width: int, height: int) -> bytes:
    """An extended WebP of a size, with nothing in it."""
    body = b"VP8X" + struct.pack("<I", 10) + b"\x10\0\0\0" + struct.pack("<I", width - 1)[:3] \
        + struct.pack("<I", height - 1)[:3]
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def gif_screen(width: int, height: int, frames: int = 1) -> bytes:
    """A GIF whose screen and frames are as large as 16 bits allow."""
    frame = b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x4c\x01\0"
    return (b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6)
            + frame * frames + b";")


def bmp(width: int, height: int, bits: int = 24, compression: int = 0) -> bytes:
    return b"BM" + struct.pack("<IHHIIiiHHIIiiII", 200, 0, 0, 54, 40, width, height, 1, bits,
                               compression, 0, 0, 0, 0, 0) + bytes(100)


def crafted(rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """(name, file): each a known trick. None is a good image."""
    yield from {
            "svg": b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg' width='9'/>",
            "svg-bomb": b"<svg><!ENTITY a '" + b"&a;" * 1000 + b"'></svg>",
            "html": b"<html><script>1</script></html>", "pdf": b"%PDF-1.7\n1 0 obj\n",
            "ps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(%pipe%id) (r) file",
            "eps": b"\xc5\xd0\xd3\xc6" + bytes(40), "playlist": b"#EXTM3U\nfile:///etc/passwd\n",
            "ico": b"\0\0\1\0\1\0" + bytes(40), "psd": b"8BPS\0\1" + bytes(60),
            "zip": b"PK\x03\x04" + bytes(60), "gzip": zlib.compress(bytes(99), wbits=31),
            "text": b"hello", "nothing": b"", "zero": bytes(2000), "one": b"\x89",
            "avif": b"\0\0\0\x1cftypavif" + bytes(40), "heic": b"\0\0\0\x1cftypheic" + bytes(40),
            "jp2": b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(40), "qoi": b"qoif" + bytes(30),
            "sgi": b"\x01\xda\1\1" + bytes(600), "ppm": b"P6 99999999 99999999 255\n",
            "xbm": b"#define a_width 99999\n#define a_height 99999\n"}.items()
    for width, height in ((60000, 60000), (1, 60000), (60000, 1), (0, 0), (0, 9), (9, 0),
                          (2**31 - 1, 2**31 - 1), (-1, -1), (16383, 16383), (65535, 65535)):
        yield f"png-{width}x{height}", png(width, height)
        yield f"jpeg-{width}x{height}", jpeg_sized(rng, width & 0xFFFF, height & 0xFFFF)
        yield f"gif-{width}x{height}", gif_screen(width & 0xFFFF, height & 0xFFFF)
        yield f"bmp-{width}x{height}", bmp(width, height)
        yield f"tiff-{width}x{height}", tiff_image(width & 0xFFFFFFFF, height & 0xFFFFFFFF)
        yield f"webp-{width}x{height}", webp_canvas(max(width, 1) & 0xFFFFFF,
                                                    max(height, 1) & 0xFFFFFF)
    bomb = zlib.compress(bytes(80 << 20), 9)
    yield "png-text-bomb", png(9, 9, chunk(b"zTXt", b"a\0\0" + bomb))
    yield "png-itxt-bomb", png(9, 9, chunk(b"iTXt", b"a\0\1\0\0\0" + bomb))
    yield "png-many-texts", png(9, 9, *[chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(900_000)))
                                        for _ in range(90)])
    yield "png-icc-bomb", png(9, 9, chunk(b"iCCP", b"a\0\0" + bomb))
    yield "png-data-bomb-small-header", png(9, 9, chunk(b"IHDR", bytes(13)), data=bomb)
    yield "png-bad-length", png(9, 9, chunk(b"tEXt", b"a\0b", length=2**31 - 1))
    yield "png-bad-crc", png(9, 9, chunk(b"gAMA", bytes(4), crc=1))
    yield "png-no-data", png(99, 99, data=zlib.compress(b""))
    yield "png-depth-3", png(9, 9, depth=3)
    yield "png-color-9", png(9, 9, color=9)
    yield "png-palette-without", png(9, 9, color=3, data=zlib.compress(bytes(range(90))))
    yield "apng-lies", png(9, 9, chunk(b"acTL", struct.pack(">II", 2**31, 0)), data=b"x")
    yield "tiff-loop", tiff((256, 4, 1, 9), following=8)
    yield "tiff-count", tiff_image(9, 9, (700, 1, 2**32 - 1, 8))
    yield "tiff-tile", tiff_image(9, 9, (322, 4, 1, 2**31), (323, 4, 1, 2**31), compression=5)
    yield "tiff-no-tags", tiff()
    yield "tiff-samples", tiff_image(9, 9, (277, 3, 1, 60000))
    for compression in (2, 3, 4, 5, 6, 7, 8, 32773, 32946, 34712, 50000, 65000):
        yield f"tiff-compression-{compression}", tiff_image(50, 50, compression=compression)
    for compression in (1, 2, 3, 4, 5, 77):
        yield f"bmp-compression-{compression}", bmp(50, 50, 8, compression)
    yield "gif-no-frames", b"GIF89a" + struct.pack("<HHBBB", 9, 9, 0, 0, 0) + b";"
    yield "gif-code-size", gif_screen(9, 9).replace(b"\x02\x02\x4c", b"\xff\x02\x4c")
    good = saved(noise(rng), "PNG")
    yield "polyglot-gif-html", b"GIF89a/*<svg/onload=alert(1)>*/" + bytes(30)
    yield "polyglot-pdf-png", b"%PDF-1.4\n" + good
    yield "polyglot-zip-png", b"PK\x03\x04" + good
    yield "polyglot-jpeg-head", b"\xff\xd8\xff" + good
    yield "polyglot-bmp-text", b"BMW is a car" + good


def mutated(rng: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    """Good files, spoilt: cut, with bits turned, pieces taken out, doubled or set to ones. Some of
    them stay readable."""
    exif = Image.Exif()
    exif[0x0112], exif[0x9286] = 6, b"c" * 300
    info = PngImagePlugin.PngInfo()
    info.add_text("a", "b" * 300, zip=True)
    good = [saved(noise(rng), kind) for kind in SAVED] + [
        saved(noise(rng), "JPEG", exif=exif, icc_profile=rng.randbytes(500), progressive=True),
        saved(noise(rng).convert("CMYK"), "JPEG"), saved(noise(rng), "WEBP", exif=exif),
        saved(noise(rng).convert("P"), "PNG", pnginfo=info), saved(noise(rng).convert("1"), "TIFF",
        compression="group4"), animation(rng, "GIF", 4), animation(rng, "WEBP", 3),
        saved(noise(rng), "TIFF", compression="jpeg")]
    for index in range(count):
        data = bytearray(good[index % len(good)])
        how = rng.choice(["cut", "bits", "head", "out", "twice", "ones"])
        at = rng.randrange(len(data))
        end = at + rng.randint(1, 40)
        if how == "cut":
            del data[at:]
        elif how == "out":
            del data[at:end]
        elif how == "twice":
            data[at:at] = data[at:end]
        elif how == "ones":
            data[at:end] = b"\xff" * len(data[at:end])
        else:
            for _ in range(rng.randint(1, 12)):
                where = rng.randrange(min(len(data), 200 if how == "head" else len(data)))
                data[where] ^= 1 << rng.randrange(8)
        yield f"{index}-{how}", bytes(data)
