"""The output of a run: lines and a progress bar, metrics.jsonl, other loggers, one page of HTML.

Start with `run_log`, then `metrics`. Nothing here decides how a run continues.
"""
