"""``phalanx trace``: black boxes as one timeline for ui.perfetto.dev. Start with `perfetto`."""
