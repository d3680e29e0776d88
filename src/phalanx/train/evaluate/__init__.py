"""A model over data of which each sample counts once, and which evaluation was the best. Start with `evaluation`."""
