"""Send tensors from rank to rank: waiting, without waiting, several at once.

Start it with any number of ranks:

    phalanx run --nproc-per-node 2 examples/point_to_point.py
    torchrun --nproc-per-node 2 examples/point_to_point.py
"""

import sys

import torch
import torch.distributed as dist

import phalanx


def relay(rank, world_size):
    """Blocking: `recv` returns when the tensor is there, `send` when it may be changed again."""
    tensor = torch.zeros(1)
    if rank > 0:
        dist.recv(tensor, src=rank - 1)
    tensor += 1
    if rank < world_size - 1:
        dist.send(tensor, dst=rank + 1)
    print(f"rank {rank}: relay: one more makes {tensor.item():.0f}")


def swap(rank, world_size):
    """Non-blocking: begin, compute something else, then wait. Until then, touch neither tensor."""
    other = rank ^ 1  # 0 and 1 swap, 2 and 3 swap, ...
    if other == world_size:  # the last of an odd number has no partner
        return
    outgoing, incoming = torch.full((2,), float(rank)), torch.empty(2)
    # Two ranks that both call send() first may wait for each other for ever; isend() never waits.
    requests = [dist.isend(outgoing, dst=other), dist.irecv(incoming, src=other)]
    meanwhile = torch.ones(100, 100) @ torch.ones(100, 100)
    for request in requests:
        request.wait()
    print(f"rank {rank}: swap: got {incoming.tolist()}, and computed {meanwhile[0, 0]:.0f} meanwhile")


def shift(rank, world_size):
    """Several at once: each rank sends to its right neighbour and receives from its left one."""
    outgoing, incoming = torch.tensor([rank]), torch.tensor([-1])
    operations = [
        dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size),
        dist.P2POp(dist.irecv, incoming, (rank - 1) % world_size),
    ]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    print(f"rank {rank}: shift: got {incoming.item()} from my left neighbour")


def collect(rank, world_size):
    """Whoever comes first: `recv` without a source takes a tensor from any rank, and tells from which."""
    if rank > 0:
        dist.send(torch.tensor([rank * rank]), dst=0)
        return
    tensor, squares = torch.empty(1, dtype=torch.int64), {}
    for _ in range(world_size - 1):
        sender = dist.recv(tensor)
        squares[sender] = tensor.item()
    print(f"rank 0: collect: {dict(sorted(squares.items()))}")


def post(rank, world_size):
    """Any Python object, by way of pickle. A tag of its own keeps one kind of message from another."""
    if rank == 0:
        dist.send_object_list([{"lr": 0.1}, "adam"], dst=1)
        tensors = torch.tensor([1.0]), torch.tensor([2.0])
        for request in [dist.isend(tensor, dst=1, tag=tag) for tag, tensor in enumerate(tensors, 1)]:
            request.wait()
    elif rank == 1:
        objects = [None, None]
        dist.recv_object_list(objects, src=0)
        tensor, order = torch.empty(1), []
        for tag in (2, 1):  # the other way round than they were sent
            dist.recv(tensor, src=0, tag=tag)
            order.append(tensor.item())
        print(f"rank 1: post: {objects}, then {order}")


def main():
    with phalanx.init() as session:
        if session.world_size < 2:
            sys.exit("one rank has nobody to talk to: phalanx run --nproc-per-node 2 examples/point_to_point.py")
        for step in (relay, swap, shift, collect, post):
            step(session.rank, session.world_size)
            dist.barrier()  # only so that what is printed comes in order


if __name__ == "__main__":
    main()
