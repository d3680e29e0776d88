"""What `tools/draw.py` draws with: `canvas` holds shapes and colours, the other modules one function per picture."""
