"""The dimensions every tiny model shares.

Tables and rules refer to these names, never to bare numbers, so that one edit changes all models.
"""

HEADS = 4
HEAD_DIM = 16
WIDTH = HEADS * HEAD_DIM
FEED_FORWARD = WIDTH + WIDTH // 2
LAYERS = 2
VOCABULARY = 99
POSITIONS = 128
IMAGE = 32
PATCH = 8
EXPERTS = 4
WINDOW = 8
MELS = 16
LENGTH = 24
GRID = IMAGE // PATCH
SAMPLES = 1600
