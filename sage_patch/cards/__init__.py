"""NVIDIA cards by name (table.py, cards.json), and what is predicted for them (model.py, tile_counts.json)."""
