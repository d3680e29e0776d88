"""``phalanx trace``: black boxes as one time line that ui.perfetto.dev opens. Start with `perfetto`."""
