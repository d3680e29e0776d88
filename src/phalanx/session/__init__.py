"""`phalanx.init`: a process's place in its job, its device, its group, and how it outlives the failure of other ranks.

Start with `session`, then `meeting_point`, which finds the place, and `survival`, which leaves a broken group and takes
a place in the next. `loop` has helpers for hand-written training loops; only they see a model or tensors of the script.
Nothing here makes a model, loads data or knows of a Trainer.
"""
