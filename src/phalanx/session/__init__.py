"""`phalanx.init`: a process's place in its job, its device, its group, and how it outlives the failure of other ranks.

Start with `session`. Then read `meeting_point`, which finds the place, and `survival`, which leaves a broken group and
takes a place in the next one. `loop` has helpers for hand-written training loops; only these helpers see a model or
tensors of the script. Nothing here makes a model, loads data or depends on the Trainer.
"""
