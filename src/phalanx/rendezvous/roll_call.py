"""The roll call: rank 0 waits until every rank has arrived in the store, then tells each rank that all have arrived.

Each rank writes a record into the store (rank, world size, backend, process, line of the script). When a rank finds the
record of rank 0, which contains a fresh token, it writes its own record again under that token, and waits for an answer
under its own token. Rank 0 reads the records under its token, compares them, and answers every rank with the same fresh
prefix for the keys of the group. This detects two processes with the same rank, contradictory world sizes and different
backends, and every rank raises the same error.

**Leftovers do no harm.** A file, or the store of torchrun's agent, may hold the records of an earlier group, attempt or
run. (The agent keeps one store for all attempts; its restart count can't separate them, because it may differ between
nodes.) None of these records is under the current token, because dead ranks answer no token. A rank answers every
rank 0 whose record it finds, unless ``/proc`` shows that this rank 0 has ended. But a rank compares its numbers only
with a rank 0 that is known to be alive. On the same host, ``/proc`` shows this; on another host, reports that rank 0
keeps writing show it. If a rank dies during the roll call, a rank 0 on the same host notices it in ``/proc``; in the
same way, ranks on rank 0's host notice the death of rank 0.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch.distributed as dist

import phalanx
from phalanx import _env
from phalanx._errors import CollectiveTimeout, PhalanxError, RankFailed
from phalanx._text import enumerated
from phalanx.host.network import host_identity
from phalanx.rendezvous.asked import Asked, cpu_backend
from phalanx.rendezvous.deadlines import NOTE_S, PART_S
from phalanx.rendezvous.launched import start_time
from phalanx.rendezvous.patience import Patience
from phalanx.rendezvous.server import is_listening, who_left
from phalanx.wire.messages import GarbledError, Shape, one_of, read_value, understand
from phalanx.wire.store import JsonStore, StoreGoneError, shared_pause
from phalanx.wire.waiting import StoreSilentError, wait_until

_PAUSE_S = 0.005  # time between queries of the store
_MOST_NAMED = 8  # limit on the number of missing ranks that a message names
_LOOK_S = 0.2  # time between checks whether a missing rank can still come
_ADVICE = (
    "Every rank must call init_process_group: start those that are missing, or look at what they printed last; one may "
    "have ended before this call, perhaps with exit code 0"
)

_GLOO_REPLACED = "gloo, replaced by phalanx"
_KINDS = {kind.__name__: kind for kind in (PhalanxError, CollectiveTimeout, RankFailed)}
Record = dict[str, Any]
_RECORD = {
    "rank": int,
    "world_size": int,
    "where": str,
    "backend": lambda told: told and read_value(told, str),
    "token": str,
    "process": (str, int, int),
    "host": str,
}
_BEAT = {"token": str, "look": int, "ranks": [int]}
_ANSWER = {"prefix": str, "pids": [(int, int)]}
_REFUSAL = {"kind": one_of(*_KINDS), "text": str, "ranks": [int], "facts": dict}


def _read_word(told: Any) -> Any:
    return read_value(told, _ANSWER if isinstance(told, dict) and "prefix" in told else _REFUSAL)


class RollCall:
    """This rank's part in the meeting of a world in `store`.

    Attributes:
        pids: Process ids of the ranks on this host; empty until all ranks of the world have arrived.
    """

    def __init__(self, store: dist.Store, asked: Asked, patience: Patience) -> None:
        self._store = JsonStore(dist.PrefixStore("phalanx-roll", store))
        self._asked = asked
        self._patience = patience
        self._mine: Record = {
            "rank": asked.rank,
            "world_size": asked.world_size,
            "where": asked.where,
            "backend": asked.backend,
            "is_in_place": asked.is_in_place,
            "version": phalanx.__version__,
            "token": os.urandom(8).hex(),
            "process": [host_identity(), os.getpid(), start_time(os.getpid())],
            "host": _env.host_name(),
        }
        self.pids: dict[int, int] = {}
        self._keys = [f"here/{self._mine['token']}/{rank}" for rank in range(asked.world_size)]  # used on rank 0
        self._answered = ""  # token of the rank 0 that this rank has answered
        self._rank_0 = ""  # token of a rank 0 known to be alive
        self._server: Record | None = None  # record of the store's server, if ranks have met in the store before
        self._beat: dict[str, Any] = {}  # rank 0's last report of missing ranks
        self._num_looks = 0
        self._missing: list[int] = []
        self._doubts = False  # whether the last look saw a rank end; the next one reads what the rank last wrote

    def answer(self) -> str | None:
        """Return the prefix of the group's keys once all ranks have arrived.

        Return None if the store is gone but rank 0 lives. In that case, the store belonged to an earlier group that
        rank 0 has just left, and rank 0 will serve another store.

        Raises:
            CollectiveTimeout: Ranks did not arrive within the timeout.
            RankFailed: A rank ended before all had arrived.
            PhalanxError: Two processes claim the same rank, or the ranks disagree on world size or backend.
        """
        ask = self._call if self._asked.rank == 0 else self._reply
        most_s = shared_pause(_PAUSE_S, self._asked.world_size)
        try:
            has_arrived = wait_until(self._arrive, self._patience.deadline, most_s=most_s)
            with contextlib.suppress(StoreSilentError):
                if has_arrived and (
                    prefix := wait_until(
                        ask, self._patience.deadline, seldom=self._look, seldom_s=_LOOK_S, most_s=most_s
                    )
                ):
                    return prefix
                self._look()
            raise self._timed_out()
        except StoreGoneError as error:
            if self._is_served_again():
                return None
            raise self._lost_store(error) from error
        finally:
            self._store.close()

    def _arrive(self) -> bool:
        """Write that this rank is here; return True. If the store does not answer, this can be called again."""
        rank, here = self._asked.rank, self._mine["process"][0]
        self._server = self._read("server", _RECORD)
        before = self._record(rank)
        if rank == 0:
            self._set("server", self._mine)
            self._set(self._keys[0], self._mine)
        self._set(f"rank/{rank}", self._mine)
        if before is None or before["process"] == self._mine["process"]:
            return True
        if before["process"][0] == here and not _has_ended(before):  # on another host, a process's end can't be seen
            self._fail(_two_of(before, self._mine), (rank,), facts={"entry": "same-rank"}, also=before)
        return True

    def raise_rival(self) -> None:
        """Raise an error if another live process serves this store as rank 0."""
        deadline = min(self._patience.deadline, time.monotonic() + NOTE_S)
        with contextlib.suppress(StoreGoneError, StoreSilentError):  # the store may just be closing
            # The rival may listen for a moment before it has written its record.
            server = wait_until(lambda: self._read("server", _RECORD), deadline)
            if server is not None and not _has_ended(server):
                self._fail(_two_of(server, self._mine), (0,), facts={"entry": "same-rank"}, also=server)

    # ---- records in the store --------------------------------------------------------------------------------------

    def _read(self, key: str, shape: Shape) -> Any:
        """Return the value of a key; None if the key has no value of this shape."""
        with contextlib.suppress(GarbledError):
            return self._store.get(key, shape)
        return None

    def _set(self, key: str, value: Any) -> None:
        self._store.set(key, value, max(self._patience.left_s, PART_S))

    def _record(self, rank: int, key: str = "rank") -> Record | None:
        """Return the record under a rank's number; the process that wrote it may have ended long ago."""
        record: Record | None = self._read(f"{key}/{rank}", _RECORD)
        return record

    def _live_rank_0(self) -> Record | None:
        """Return the record of rank 0 if it is alive: its process lives on this host, or it has reported recently."""
        told, beat = self._record(0), self._read("missing", _BEAT) or {}
        has_looked = bool(self._beat) and beat != self._beat
        self._beat = beat
        if told is None or told["token"] == self._rank_0:
            return told
        lives = not _has_ended(told) if _is_here(told) else has_looked and beat.get("token") == told["token"]
        self._rank_0 = told["token"] if lives else ""
        return told if lives else None

    def _answer(self) -> None:
        """Tell the rank 0 whose record is in the store that this rank is here."""
        told = self._record(0)
        if told is not None and told["token"] != self._answered and not _has_ended(told):
            self._set(f"here/{told['token']}/{self._asked.rank}", self._mine)
            self._answered = told["token"]

    def _reply(self) -> str | None:
        """On ranks other than 0: answer rank 0 if not done yet; return the prefix if rank 0 has sent it, else None."""
        if not self._answered:
            self._answer()
        return self._word()

    def _word(self) -> str | None:
        """Return the prefix that was sent to this rank, or None if nothing was sent. If an error was sent, raise it."""
        word = self._read(f"word/{self._mine['token']}", _read_word)
        if word is None:
            return None
        if "prefix" in word:
            self.pids = dict(word["pids"])
            return str(word["prefix"])
        text, ranks = f"{self._asked.name}: {word['text']}", tuple(word["ranks"])
        raise _KINDS[word["kind"]](text, op="join", ranks=ranks, **word["facts"])

    def _call(self) -> str | None:
        """On rank 0: once all ranks have arrived, send each rank the prefix and return it; None before that."""
        try:
            records = [understand(text, _RECORD) for text in self._store.get_all(self._keys)]
        except GarbledError:
            return None
        if not records:
            return None
        self._compare(records)
        prefix = f"phalanx-{self._mine['token']}"
        pids: dict[str, list[tuple[int, int]]] = {}
        for rank, record in enumerate(records):
            host, pid, _ = record["process"]
            pids.setdefault(host, []).append((rank, pid))
        self.pids = dict(pids[self._mine["process"][0]])
        words = {f"word/{one['token']}": {"prefix": prefix, "pids": pids[one["process"][0]]} for one in records}
        # Overwritten, not deleted: a rank that has just seen that a key exists would wait in vain for its value.
        leftovers = {f"rank/{rank}": None for rank in range(self._asked.world_size)}
        self._store.set_all({**words, **leftovers}, max(self._patience.left_s, PART_S))
        return prefix

    def _all_here(self) -> list[Record | None]:
        """Return, by rank, the records of the ranks that have answered this rank 0; None for a rank that has not."""
        return [self._record(rank, f"here/{self._mine['token']}") for rank in range(self._asked.world_size)]

    def _give(self, record: Record | None, word: dict[str, Any]) -> None:
        if record is not None:
            self._set(f"word/{record['token']}", word)

    # ---- who can't come --------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Raise if the ranks certainly can't meet; otherwise tell `patience` which ranks are missing."""
        rank = self._asked.rank
        self._word()
        mine = self._record(rank)
        if mine is not None and mine["token"] != self._mine["token"]:
            self._fail(_two_of(self._mine, mine), (rank,), facts={"entry": "same-rank"}, also=mine)
        if rank == 0:
            records = self._all_here()
            self._compare(records)
            self._missing = [other for other, record in enumerate(records) if record is None]
            self._num_looks += 1
            beat = {"token": self._mine["token"], "look": self._num_looks, "ranks": self._missing}
            self._set("missing", beat)
        else:
            self._answer()
            records = [self._live_rank_0(), mine]
            self._compare(records)
            is_todays = self._beat.get("token") == self._rank_0
            self._missing = [0] if records[0] is None else self._beat["ranks"] if is_todays else []
        self._look_for_deaths(records)
        self._patience.awaits_ranks = True
        self._patience.awaits = (
            f"{self._awaited} at {self._asked.point}",
            f"WORLD_SIZE is {self._asked.world_size}. {_ADVICE}",
        )

    @property
    def _awaited(self) -> str:
        return enumerated("rank", self._missing, _MOST_NAMED) if self._missing else "rank 0 to begin the roll call"

    def _timed_out(self) -> CollectiveTimeout:
        """Tell the other ranks that the time is up, and return the error."""
        asked, entry = self._asked, "not-met"
        what = f"{self._awaited} did not come to {asked.point}, and WORLD_SIZE is {asked.world_size}. {_ADVICE}."
        if self._store.is_silent:
            entry = "store-lost"
            what = (
                f"the store at {asked.point} does not answer. Check whether the process that serves it, rank 0 or the "
                "launcher's agent, is stopped or its host overloaded."
            )
        text = f"timed out after {asked.timeout_s:g} s: {what}"
        self._tell(text, tuple(self._missing), CollectiveTimeout, {"entry": entry})
        return CollectiveTimeout(f"{asked.name}: {text}", op="join", ranks=tuple(self._missing), entry=entry)

    def _look_for_deaths(self, records: list[Record | None]) -> None:
        left = who_left(self._asked)
        dead = [record for record in records if record is not None and _has_ended(record)]
        if left is not None and self._doubts:
            text, facts = left
            self._fail(text, facts.pop("ranks"), kind=RankFailed, facts={**facts, "entry": "rank-failed-early"})
        if dead and self._doubts:
            one = dead[0]
            self._fail(
                f"rank {one['rank']} (pid {one['process'][1]} on {one['host']}) has ended within init_process_group"
                f"{_at(one)}\nLook at what rank {one['rank']} printed last.",
                tuple(record["rank"] for record in dead),
                kind=RankFailed,
                facts={
                    "pid": one["process"][1],
                    "exit_code": None,
                    "signal": None,
                    "entry": "rank-failed-early",
                },
            )
        self._doubts = left is not None or bool(dead)

    def _compare(self, records: Sequence[Record | None]) -> None:
        """Raise if ranks that have arrived differ in world size or version, or if only some asked for our backend."""
        here = [record for record in records if record is not None]
        sizes = _first_of_each(here, lambda record: record["world_size"])
        if len(sizes) > 1:
            told = [f"{size} on {_place(one)}" for size, one in sorted(sizes.items())]
            self._contradict(
                "give different values of world_size", told, "the number of all ranks", sizes.values(), "world-size"
            )
        kinds = _first_of_each([record for record in here if record["backend"] is not None], _kind)
        if len(kinds) > 1 and any("phalanx" in kind for kind in kinds):
            told = [f"{_asked_for(one)} on {_place(one)}" for one in kinds.values()]
            right = "PHALANX_REPLACE=gloo, or none" if _GLOO_REPLACED in kinds else "the same backend"
            self._contradict("ask for different backends", told, right, kinds.values(), "different-backends")
        versions = _first_of_each(here, lambda record: record.get("version", "an older one"))
        if len(versions) > 1:
            told = [f"{version} on {_place(one)}" for version, one in versions.items()]
            self._contradict(
                "run different versions of phalanx", told, "the same", versions.values(), "different-versions"
            )

    def _contradict(self, what: str, told: list[str], right: str, records: Collection[Record], entry: str) -> None:
        text = f"the ranks {what}: {', '.join(told)}\nGive every rank {right}."
        self._fail(text, tuple(one["rank"] for one in records), facts={"entry": entry})

    def _fail(
        self,
        text: str,
        ranks: tuple[int, ...],
        *,
        kind: type[PhalanxError] = PhalanxError,
        facts: dict[str, Any] | None = None,
        also: Record | None = None,
    ) -> None:
        """Report the error to the other ranks, and raise it; `also` is the record of another process with this rank."""
        self._tell(text, ranks, kind, facts, also)
        raise kind(f"{self._asked.name}: {text}", op="join", ranks=ranks, **(facts or {}))

    def _tell(
        self,
        text: str,
        ranks: tuple[int, ...],
        kind: type[PhalanxError],
        facts: dict[str, Any] | None = None,
        also: Record | None = None,
    ) -> None:
        """Tell the other ranks why the ranks can't meet."""
        word = {"kind": kind.__name__, "text": text, "ranks": ranks, "facts": facts or {}}
        with contextlib.suppress(StoreSilentError):
            said = [self._record(rank) for rank in range(self._asked.world_size)]
            most = max((one["world_size"] for one in said if one is not None), default=0)
            others = [also, *said, *(self._record(rank) for rank in range(self._asked.world_size, most))]
            others = [one for one in others if one is not None and one["token"] != self._mine["token"]]
            for one in others:
                self._give(one, word)
            if others and self._asked.rank == 0:
                time.sleep(PART_S)

    def _is_served_again(self) -> bool:
        """Whether the store is gone only because rank 0 has closed it: rank 0 listens again, or its process lives."""
        asked, deadline = self._asked, time.monotonic() + NOTE_S
        is_rank_0s = not (asked.is_served or asked.path)

        def listens() -> bool | None:
            if who_left(asked) is not None:
                return False
            return (is_rank_0s and is_listening(asked)) or None

        if wait_until(listens, deadline, least_s=_PAUSE_S, most_s=_PAUSE_S):
            return True
        if not is_rank_0s or who_left(asked) is not None or self._patience.deadline < deadline:
            return False
        return self._server is not None and _is_here(self._server) and not _has_ended(self._server)

    def _lost_store(self, error: Exception) -> PhalanxError:
        """Return the error for a store that is gone together with the process that served it."""
        if (left := who_left(self._asked)) is not None:
            return RankFailed(f"{self._asked.name}: {left[0]}", op="join", entry="rank-failed-early", **left[1])
        server = "the launcher's agent" if self._asked.is_served else "rank 0"
        return RankFailed(
            f"{self._asked.name}: the store at {self._asked.point} is gone, and so is {server}, which served it "
            f"({error})\nLook at what {server} printed last.",
            op="join",
            ranks=() if self._asked.is_served else (0,),
            entry="store-lost",
            pid=None,
            exit_code=None,
            signal=None,
        )


def _first_of_each(records: list[Record], kind: Callable[[Record], Any]) -> dict[Any, Record]:
    found: dict[Any, Record] = {}
    for record in records:
        found.setdefault(kind(record), record)
    return found


def _kind(record: Record) -> str:
    """Return the backend of a rank's CPU tensors."""
    return _GLOO_REPLACED if record.get("is_in_place") else cpu_backend(record["backend"])


def _asked_for(record: Record) -> str:
    return f"{record['backend'] or None!r}{' (replaced by phalanx)' if record.get('is_in_place') else ''}"


def _place(record: Record) -> str:
    return f"rank {record['rank']}" + (f" (at {record['where']})" if record["where"] else "")


def _at(record: Record) -> str:
    """Return `` at train.py:12``; empty if no line of a script has made the call."""
    return f" at {record['where']}" if record["where"] else ""


def _two_of(one: Record, other: Record) -> str:
    said = " and ".join(f"pid {r['process'][1]} on {r['host']}{_at(r)}" for r in (one, other))
    return (
        f"two processes claim rank {one['rank']}: {said}\nGive each process its own rank, by RANK or rank=; if you "
        "leave rank= out, init_process_group takes it from the launcher."
    )


def _is_here(record: Record) -> bool:
    return bool(record["process"][0] == host_identity())


def _has_ended(record: Record) -> bool:
    """Whether a record's process has ended; False on other hosts, whose processes can't be seen."""
    _, pid, started = record["process"]
    return _is_here(record) and start_time(pid) != started
