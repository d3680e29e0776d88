"""One optimizer step on all ranks: loss, gradients, their average, the update, and checks for NaN and infinity.

Start with `stepper`, then `objective`. Nothing here loads data or writes a file.
"""
