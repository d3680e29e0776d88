"""What the benchmark of ``phalanx tune`` measures for comparison."""

from __future__ import annotations

from bench.tune import every_setup


def test_a_script_without_a_trainer_has_all_setups_but_those_of_a_trainer():
    plain, all_of_them = set(every_setup(with_trainer=False)), set(every_setup(with_trainer=True))
    assert plain < all_of_them
    assert len(all_of_them) == 4 * len(plain)  # two settings, on or off
