"""``PHALANX_VERIFY=gloo``: the operations of a group are done a second time on Gloo, and compared.

A group that is made while the variable is set has torch's own Gloo beside it (of phalanx in the place of Gloo, too).
Each collective and message, or every k-th with ``gloo:k``, is done again there from copies of its inputs. Where data
moves, and for minimum, maximum, bitwise operations and integers, the bits must be the same; sums, averages and
products of floats must lie within what any order of the operations allows. `bounds` states the bounds and their
sources. A difference is a `phalanx.WrongResult` on all ranks: operation, rank, line, element, both values, and a folder
with the inputs of each rank, from which `replay` calls the operation again.

**From a script**, to hunt faults of the core::

    os.environ["PHALANX_VERIFY"] = "gloo"          # before the group is made; every call is verified
    dist.init_process_group("phalanx")
    try:
        dist.all_reduce(tensor)                    # any operation, blocking or not
    except phalanx.WrongResult as error:           # on every rank, from this call or from its wait()
        print(error.op, error.ranks, error.index, error.got, error.want, error.path)

A wrong message is an error of its receiver, which leaves the group, so that the other ranks hear of it at their next
call. Faults that end in another error or a wait (the core's, such as a mismatch) are raised as always.

**What is compared** is the tensor that the user gets, after everything between torch and the core: copies of strided
tensors, overlaps, handles. What Gloo itself gets wrong is left out of its way: it sees contiguous memory alone, bool as
bytes of 0 and 1, and dtypes that it lacks in wider ones (`oracle`). Sparse all_reduce, `monitored_barrier` and tensors
of other devices are not verified; a line says so. `average_coalesced` is verified without its sum of squares.

**Cost.** Unset: nothing, since the classes of the group are chosen when it is made (`verified`). At k = 1 a call costs
what it costs on Gloo, and more where sums differ in their last bits. ``python -m bench.verify`` measures all three.

Start with `proof`. `cases` knows torch's arguments, `messages` counts messages, `reports` tells and leaves behind.
Nothing here changes a result.
"""
