"""Evaluation on data of which each sample counts once, and the choice of the best. Start with `evaluation`."""
