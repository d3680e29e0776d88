"""``PHALANX_VERIFY=gloo``: repeats a group's operations on Gloo and compares the results.

A group created while the variable is set gets a group of torch's own Gloo beside it, even where phalanx replaces Gloo.
Each collective and message, or every k-th with ``gloo:k``, is repeated there on copies of its inputs. For operations
that only copy data, for minimum, maximum and bitwise operations, and for integers, the bits must be the same; sums,
averages and products of floats must lie within bounds that hold for any order of the operations. `bounds` states the
bounds and their sources. A difference raises `phalanx.WrongResult` on all ranks. The error gives the operation, rank,
line, element, both values, and a folder with the inputs of each rank, from which `replay` repeats the operation.

**From a script**, to find bugs in the core::

    os.environ["PHALANX_VERIFY"] = "gloo"          # before the group is made; every call is verified
    dist.init_process_group("phalanx")
    try:
        dist.all_reduce(tensor)                    # any operation, blocking or not
    except phalanx.WrongResult as error:           # on every rank, from this call or from its wait()
        print(error.op, error.ranks, error.index, error.got, error.want, error.path)

A wrong message raises the error on its receiver, which leaves the group; the other ranks get RankFailed at their next
call. Failures with an error of their own, such as a mismatch or a timeout, are raised as usual.

**What is compared** is the tensor that the user gets, after everything between torch and the core: copies of strided
tensors, overlaps, handles. Gloo is never given input that it handles wrongly: it sees only contiguous memory, bools as
bytes of 0 and 1, and unsupported dtypes converted to wider ones (`oracle`). Sparse all_reduce, `monitored_barrier` and
tensors on other devices are not verified; a printed line says so. The sum of squares of `average_coalesced` is not
verified either.

**Cost.** If the variable is unset, verification costs nothing, since the classes of a group are chosen when the group
is made (`verified`). At k = 1, each call also takes the time of this call on Gloo, and more if sums differ in their
last bits. ``python -m bench.verify`` measures all three cases.

Start with `proof`. `cases` knows torch's arguments, `messages` verifies messages, `reports` makes errors and files.
Nothing here changes a result.
"""
