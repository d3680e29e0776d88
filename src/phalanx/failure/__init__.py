"""The end of a rank, its cause, and the report to the user: last words, causes, tracebacks, hints, explanations.

A rank writes `last_words`. From these, `ending` derives how the rank ended and which rank was the cause. `report` shows
both on one screen, with a line of `hints`; `explain/` has a page for each message. Start with `ending`, then `report`.
Nothing here starts, signals or watches a process.
"""
