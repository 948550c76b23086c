"""Make the training pictures and clips of the shipped pipelines.

    python scripts/make_assets/make_data.py clipart PNG_FOLDER FONT.ttf clipart.npz
    python scripts/make_assets/make_data.py vizdoom CLIPS clips.npz

clipart: PNG_FOLDER is /usr/share/openclipart/png of Debian's openclipart-png (public domain), FONT.ttf the bitmap font
of fonts-noto-color-emoji (OFL 1.1); needs fontTools. vizdoom: renders clips with the PyPI package of that name.
The file holds x (uint8), y (the class of each) and names (of the classes).
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
from PIL import Image

SIDE = 64
FRAMES, TICKS = 16, 3  # frames of a clip, and game ticks from one to the next
SCENES = ("my_way_home", "health_gathering_supreme", "deathmatch", "defend_the_center")
MOVES = ([1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [1, 0, 1])  # forward, left, right


def clipart(folder: Path, font: Path) -> tuple[list[np.ndarray], list[int], list[str]]:
    """Distinct pictures [64, 64, 3] on white; class 0 is the emoji, the others are the folders of the clip art."""
    from fontTools.ttLib import TTFont

    names, found = ["emoji"], {}
    for file in sorted(folder.rglob("*.png"), key=str):
        kind = file.relative_to(folder).parts[0]
        if file.is_symlink() or "/shapes/stars" in str(file):  # over a thousand stars that are nearly the same
            continue
        try:
            image = Image.open(file)
            pixels = _square(image) if min(image.size) >= 32 and max(image.size) <= 6000 else None
        except OSError:
            continue
        if pixels is not None and pixels.std() >= 4:
            names += [kind] if kind not in names else []
            found[pixels.tobytes()] = (pixels, names.index(kind))
    for strike in TTFont(font)["CBDT"].strikeData:
        for glyph in strike.values():
            pixels = _square(Image.open(io.BytesIO(glyph.imageData)))
            found[pixels.tobytes()] = (pixels, 0)
    return [p for p, _ in found.values()], [k for _, k in found.values()], names


def _square(image: Image.Image) -> np.ndarray:
    image, side = image.convert("RGBA"), max(image.size)
    paper = Image.new("RGBA", (side, side), "white")
    paper.alpha_composite(image, ((side - image.width) // 2, (side - image.height) // 2))
    return np.asarray(paper.convert("RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS))


def vizdoom(count: int) -> tuple[list[np.ndarray], list[int], list[str]]:
    """Clips [16, 64, 64, 3] of a random walk through each scene; those in which little moves are left out."""
    import vizdoom as vz

    clips, kinds = [], []
    for kind, scene in enumerate(SCENES):
        game, random, frames = vz.DoomGame(), np.random.default_rng(kind), []
        game.load_config(str(Path(vz.scenarios_path) / f"{scene}.cfg"))
        game.set_screen_resolution(vz.ScreenResolution.RES_160X120)
        game.set_screen_format(vz.ScreenFormat.RGB24)
        for hide in (game.set_render_hud, game.set_render_weapon, game.set_render_crosshair, game.set_window_visible):
            hide(False)
        game.set_available_buttons([vz.Button.MOVE_FORWARD, vz.Button.TURN_LEFT, vz.Button.TURN_RIGHT])
        game.set_episode_timeout(100_000)
        game.set_seed(kind + 1)
        game.init()
        move = MOVES[0]
        while kinds.count(kind) < count // len(SCENES):
            if game.is_episode_finished() or game.is_player_dead():
                game.new_episode()
                frames = []
            if len(frames) % 8 == 0:
                move = MOVES[random.integers(len(MOVES))]
            frames.append(game.get_state().screen_buffer[::2, 20:140:2])  # the middle, 60 x 60
            game.make_action(move, TICKS)
            if len(frames) == FRAMES:
                clip, frames = np.stack(frames), []
                if clip.std(0).mean() > 4:
                    clips.append(np.pad(clip, ((0, 0), (2, 2), (2, 2), (0, 0)), mode="edge"))
                    kinds.append(kind)
        game.close()
    return clips, kinds, list(SCENES)


if __name__ == "__main__":
    made = clipart(Path(sys.argv[2]), Path(sys.argv[3])) if sys.argv[1] == "clipart" else vizdoom(int(sys.argv[2]))
    np.savez_compressed(sys.argv[-1], x=np.stack(made[0]), y=np.array(made[1], np.uint8), names=np.array(made[2]))
