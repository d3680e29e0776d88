"""pandas and pyarrow: tables that ranks and workers read from one copy."""

import numpy as np
import pandas
import pyarrow
import torch.distributed as dist
from _told import model, tell
from torch.utils.data import Dataset

import phalanx

NUM_ROWS = 3000


class Rows(Dataset):
    """The rows of an Arrow table."""

    def __init__(self, table):
        self.table = table

    def __len__(self):
        return len(self.table)

    def __getitem__(self, index):
        return self.table.slice(index, 1).to_pylist()[0]["number"]


def build():
    numbers = np.arange(float(NUM_ROWS))
    names = [f"row {number}" for number in range(NUM_ROWS)]
    return pandas.DataFrame(
        {"number": numbers, "name": names, "kind": pandas.Categorical(["a", "b"] * (NUM_ROWS // 2))}
    )


dist.init_process_group("gloo")
frame = phalanx.share(build())
table = phalanx.share(lambda: pyarrow.Table.from_pandas(build()))
assert frame.equals(build())
assert table.equals(pyarrow.Table.from_pandas(build()))
with open("/proc/self/maps") as maps:
    assert maps.read().count("memfd:phalanx-dataset") == 2  # whose tables are views of it
frame.loc[0, "number"] = dist.get_rank() + 1.0  # which no other rank sees
dist.barrier()
loader = phalanx.DataLoader(phalanx.share(Rows(table)), batch_size=500, shuffle=False, num_workers=1)
sums = [None] * dist.get_world_size()
dist.all_gather_object(sums, [frame["number"].sum(), float(sum(batch.sum() for batch in loader))])
assert [number for number, _ in sums] == [sum(range(NUM_ROWS)) + rank for rank in (1.0, 2.0)]
assert sum(part for _, part in sums) == sum(range(NUM_ROWS))
tell(model(), sums=sums)
dist.destroy_process_group()
