"""Who may write a run: the process with the highest number under `leases/`.

Two processes can believe that a run is theirs: it was started twice, or declared dead while it was
only slow. Each takes a lease before it writes, `leases/000001.json` and so on, one higher than
those there are, by an exclusive create. The later one thus wins, and the earlier is told at its
next publish: before each, a writer lists `leases/` and reads its own.

Nothing but an exclusive create is needed of the store, and not even a strict one: where two
creators of one number both succeed (Swift), the second's object stays, and each reads whose it is.
What no such store can give is one step for "look, then write": a process that is stopped in the
moment between the two writes one more object when it wakes. A manifest is created exclusively all
the same, and what else it can write late is written again, in whole, by the process that goes on.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import uuid

from pydantic import BaseModel, ConfigDict, ValidationError

from backends.errors import FlowtuneError
from backends.storage.documents import encode_document, timestamp
from backends.storage.objects import AlreadyExists, NotFound, ObjectStore

LEASES_KEPT = 20
"""How many of the newest leases stay, as a record of who wrote the run."""


class LeaseLost(FlowtuneError):
    """Another process has taken the run over: this one must stop, and may write nothing more."""


class LeaseRecord(BaseModel):
    """The contents of a lease: which process wrote the run from when on."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    number: int
    owner: str
    host: str
    pid: int
    flow_run_url: str | None
    started: str

    def __str__(self) -> str:
        flow_run = f", flow run {self.flow_run_url}" if self.flow_run_url else ""
        return f"process {self.pid} on {self.host} (since {self.started}{flow_run})"


class Lease:
    """The right to write one run, until a process with a higher number takes it."""

    def __init__(self, objects: ObjectStore, run_id: str, record: LeaseRecord) -> None:
        self._objects = objects
        self._run_id = run_id
        self.record = record

    @classmethod
    def take(cls, objects: ObjectStore, run_id: str, flow_run_url: str | None = None) -> Lease:
        """A lease that outranks all there are; of several takers at once each gets its own."""
        owner = uuid.uuid4().hex
        number = 0
        while True:
            # Never the same number twice, even where a listing lags behind.
            number = max([number, *_numbers(objects, run_id)]) + 1
            record = LeaseRecord(
                number=number,
                owner=owner,
                host=socket.gethostname(),
                pid=os.getpid(),
                flow_run_url=flow_run_url,
                started=timestamp(),
            )
            with contextlib.suppress(AlreadyExists):  # another's; or ours, and its answer was lost
                objects.create(_key(run_id, number), encode_document(record.model_dump()))
            if _read(objects, run_id, number) == record:
                _remove_old(objects, run_id)
                return cls(objects, run_id, record)

    @property
    def number(self) -> int:
        """The fencing number, from 1."""
        return self.record.number

    @property
    def key(self) -> str:
        """The lease's object in the store."""
        return _key(self._run_id, self.number)

    def check(self) -> None:
        """One listing and one small read. Raises LeaseLost, naming the other process."""
        highest = max([self.number, *_numbers(self._objects, self._run_id)])
        holder = _read(self._objects, self._run_id, highest)
        if holder == self.record:
            return
        if holder is None and highest == self.number:
            why = f"its lease {self._objects.uri(self.key)} was removed"
        else:
            why = f"{holder or 'another process'} has taken it over"
        raise LeaseLost(
            f"run {self._run_id} is no longer this process's to write: {why}. This process "
            f"({os.getpid()} on {self.record.host}) stops and writes nothing more; "
            "the other one goes on"
        )


def _key(run_id: str, number: int) -> str:
    return f"{run_id}/leases/{number:06d}.json"


def _numbers(objects: ObjectStore, run_id: str) -> list[int]:
    """The numbers of all leases, rising."""
    keys = objects.keys(f"{run_id}/leases")
    found = (re.fullmatch(r".*/leases/(\d+)\.json", key) for key in keys)
    return sorted(int(match[1]) for match in found if match)


def _read(objects: ObjectStore, run_id: str, number: int) -> LeaseRecord | None:
    """The lease of that number; None if it is not there or someone broke it."""
    try:
        return LeaseRecord.model_validate_json(objects.read(_key(run_id, number)))
    except (NotFound, ValidationError):
        return None


def _remove_old(objects: ObjectStore, run_id: str) -> None:
    for number in _numbers(objects, run_id)[:-LEASES_KEPT]:
        objects.delete(_key(run_id, number))
