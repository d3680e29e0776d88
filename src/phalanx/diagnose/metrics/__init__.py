"""Metrics of jobs for Prometheus: ``phalanx run --metrics`` and ``phalanx top --metrics``.

A scrape looks at the jobs as `top` does, adds what is new to the counters, and prints all of it. Between two scrapes,
nothing is read. Start with `metrics`, which answers scrapes, then `families`, the table of all metrics. Nothing here
finds or measures anything: numbers come from the readers that ``top``, ``why`` and the report use.
"""
