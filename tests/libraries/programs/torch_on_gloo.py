"""Torch's own exam of a backend, on Gloo, each test in two new processes; torch's wheel has all but this class."""

from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend


class TestOnGloo(TestDistBackend, DistributedTest._DistTestBase):
    """What torch's repository calls TestDistBackendWithSpawn."""

    def setUp(self):
        super().setUp()
        self._spawn_processes()
