"""The pictures of `tools/draw.py`: `canvas` has shapes and colors, other modules have a function for each picture."""
