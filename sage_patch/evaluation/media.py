"""Frames -> files: PNG pictures, MP4 clips, and one sheet that shows every variant beside the unpatched one."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

DIFFERENCE = 8  # how much differences are brightened
SHOWN_FRAMES = 6  # frames of a clip on the sheet
_CELL = (128, 256)  # sides of a sheet's pictures, in pixels: small ones are enlarged, large ones reduced
_LABEL = 120  # width of the row labels, in pixels


@dataclass(frozen=True)
class Gallery:
    """Everything a run drew. labels: one a picture. drawn: frames [F, 3, H, W] from 0 to 1 by variant and picture.

    The first variant is the unpatched one. fps: frames a second of the clips; None for pictures of one frame.
    """

    labels: list[str]
    drawn: dict[str, list[Tensor]]
    fps: int | None


def missing_writer() -> str | None:
    """What to install before clips can be written; None if all is there."""
    if importlib.util.find_spec("av") is None:
        return "writing clips needs PyAV: pip install 'sage-patch[media]'"
    return None


def write_gallery(folder: Path, gallery: Gallery) -> list[Path]:
    """A PNG or MP4 for every picture of every variant, and sheet.png; returns the files."""
    files = []
    for variant, pictures in gallery.drawn.items():
        for number, frames in enumerate(pictures):
            name = f"{re.sub(r'[^a-zA-Z0-9]+', '_', variant)}_{number:02d}"
            if gallery.fps is None:
                files.append(folder / f"{name}.png")
                _image(frames[0]).save(files[-1])
            else:
                files.append(folder / f"{name}.mp4")
                write_clip(files[-1], frames, gallery.fps)
    files.append(folder / "sheet.png")
    sheet(gallery).save(files[-1], optimize=True)
    return files


def write_clip(path: Path, frames: Tensor, fps: int) -> None:
    """Write frames [F, 3, H, W] as H.264. An odd side grows by one repeated line, as the format needs even ones."""
    import av

    height, width = frames.shape[-2:]
    padded = torch.nn.functional.pad(frames, (0, width % 2, 0, height % 2), mode="replicate")
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=fps)
        stream.width, stream.height = padded.shape[-1], padded.shape[-2]
        stream.pix_fmt = "yuv420p"  # what every player reads
        stream.options = {"crf": "12"}
        for frame in padded:
            picture = av.VideoFrame.from_ndarray(_bytes(frame), format="rgb24")
            for packet in stream.encode(picture):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def sheet(gallery: Gallery) -> Image:
    """Every picture or clip, unpatched, under every variant, and the differences between them brightened.

    Pictures: a row each, variants side by side. Clips: a row for each variant, frames side by side.
    """
    exact, *others = gallery.drawn
    bright = f"difference x{DIFFERENCE}"
    rows: list[tuple[str, list[Tensor]]] = []
    if gallery.fps is None:
        heads = [exact, *(head for name in others for head in (name, bright))]
        for number, label in enumerate(gallery.labels):
            first = gallery.drawn[exact][number][0]
            cells = [first]
            for name in others:
                other = gallery.drawn[name][number][0]
                cells += [other, _difference(other, first)]
            rows.append((label, cells))
        return _grid(heads, rows)
    count = min(SHOWN_FRAMES, len(gallery.drawn[exact][0]))
    shown = torch.linspace(0, len(gallery.drawn[exact][0]) - 1, count).round().int().tolist()
    for number, label in enumerate(gallery.labels):
        clip = gallery.drawn[exact][number][shown]
        rows.append((f"{label}\n{exact}", list(clip)))
        for name in others:
            other = gallery.drawn[name][number][shown]
            rows += [(f"{label}\n{name}", list(other)), (bright, list(_difference(other, clip)))]
    return _grid([f"frame {i}" for i in shown], rows)


def _difference(actual: Tensor, exact: Tensor) -> Tensor:
    return ((actual - exact).abs() * DIFFERENCE).clamp(0, 1)


def _grid(heads: Sequence[str], rows: Sequence[tuple[str, list[Tensor]]]) -> Image:
    """Pictures [3, H, W] in a table, with a heading over each column and a label before each row."""
    from PIL import Image, ImageDraw, ImageFont

    height, width = _cell_size(*rows[0][1][0].shape[-2:])
    font = ImageFont.load_default(12)
    top, gap = 36, 4
    size = (_LABEL + len(heads) * (width + gap), top + len(rows) * (height + gap))
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)

    def write(place: tuple[int, int], text: str, room: int) -> None:
        """Words on lines of their own where they do not fit beside each other."""
        lines: list[str] = []
        for line in text.split("\n"):
            lines.append("")
            for word in re.split(r"(?<=[ :_])", line):
                if draw.textlength(lines[-1] + word, font) > room and lines[-1]:
                    lines.append("")
                lines[-1] += word
        draw.multiline_text(place, "\n".join(lines), "black", font)

    for column, head in enumerate(heads):
        write((_LABEL + column * (width + gap), 4), head, width)
    for row, (label, cells) in enumerate(rows):
        y = top + row * (height + gap)
        write((4, y), label, _LABEL - 8)
        for column, cell in enumerate(cells):
            method = Image.Resampling.NEAREST if width >= cell.shape[-1] else Image.Resampling.LANCZOS
            image.paste(_image(cell).resize((width, height), method), (_LABEL + column * (width + gap), y))
    return image


def _cell_size(height: int, width: int) -> tuple[int, int]:
    """The sides of a picture on the sheet: whole multiples of small ones, so that pixels stay square."""
    least, most = _CELL
    scale: float = max(1, least // max(height, width))
    scale = min(scale, most / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


def _image(frame: Tensor) -> Image:
    from PIL import Image

    return Image.fromarray(_bytes(frame))


def _bytes(frame: Tensor) -> Any:
    """[3, H, W] from 0 to 1 as an array [H, W, 3] of bytes; what is not a number is black."""
    return (frame.nan_to_num(0).clamp(0, 1) * 255).round().byte().permute(1, 2, 0).contiguous().cpu().numpy()
