"""Rounds: the workers of a process set agree on what all of them have submitted, and execute it in the same order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from lockstep.hvd.engine import fusion
from lockstep.hvd.engine.agreement import HEADER, HEADER_BYTES, Verdict, agree, entries_of, explain_mismatch
from lockstep.hvd.engine.pending import PendingRequests
from lockstep.hvd.engine.request import Collective, kind_of
from lockstep.hvd.engine.settings import Settings
from lockstep.hvd.engine.timeline import Timeline
from lockstep.hvd.engine.transfers import CAPACITY_BYTES, SetConnections
from lockstep.world import accelerator

STATE = CAPACITY_BYTES - 1  # the index in a message of the worker's state, which may differ in equal messages
WAITING, CAN_GIVE_BACK, LATE = 1, 2, 4  # a thread waits; it waits for a revocable request; a request is late


class Rounds:
    """The rounds of one process set on this worker; its communication thread runs them.

    Args:
        links: The set's connections.
        settings: The same on all workers of the set.
        timeline: Records every round and operation.
        pending: The requests of this worker.
    """

    def __init__(self, links: SetConnections, settings: Settings, timeline: Timeline, pending: PendingRequests) -> None:
        self._links, self._settings, self._timeline, self._pending = links, settings, timeline, pending
        self._last_joined = -1
        self._joined: tuple[bool, ...] = (False,) * links.size

    def run(self) -> bool:
        """Run one round of agreement and execution; return whether any request finished or any worker joined."""
        requests, joined = self._pending.begin_round()
        control = self._links.control
        control.outgoing[STATE] = _state_of(requests)
        self._timeline.cycle()
        block = b"".join([request.entry for request in requests])
        place = None if joined else fusion.message_slice(requests, HEADER_BYTES + len(block))
        head = HEADER.pack(len(block), joined) + block
        fits = len(head) <= STATE
        if fits:
            control.outgoing[: len(head)] = head
        else:
            control.outgoing[:HEADER_BYTES] = head[:HEADER_BYTES]
        if place:
            fusion.pack_message(requests, control.outgoing_tensor[place])
        messages = control.exchange()
        if joined or not fits or not all(message[: len(head)] == head for message in messages):
            return self._settle(requests, block, messages)
        _mark_late(requests, [message[STATE] for message in messages])
        if place:
            with self._timeline.activity(requests):
                results = fusion.unpack_message(requests, control.rows()[:, place])
            self._pending.finish(requests, results)
        else:
            self.execute(requests)
        return True

    def execute(self, requests: Sequence[Collective]) -> None:
        """Execute agreed requests, all workers in the same order."""
        for batch in fusion.plan_fusion(requests, self._settings.fusion_threshold_bytes):
            device = batch[0].tensors[0].device if batch[0].tensors else torch.device("cpu")
            with self._links.on(device) as stream, self._timeline.activity(batch):
                if stream:
                    fusion.follow(stream, batch)
                results = type(batch[0]).execute_all(batch, self._links)
            ready = stream.record_event() if stream else None
            for request in batch:
                request.ready = ready
            self._pending.finish(batch, results)

    def _settle(self, requests: Sequence[Collective], block: bytes, messages: Sequence[memoryview]) -> bool:
        """Finish a round in which the workers' messages differ."""
        heads = [HEADER.unpack_from(message) for message in messages]
        states = [message[STATE] for message in messages]
        if HEADER_BYTES + max(length for length, _ in heads) > STATE:
            blocks = self._links.control.exchange_bytes(block)
        else:
            blocks = [
                bytes(message[HEADER_BYTES : HEADER_BYTES + length])
                for message, (length, _) in zip(messages, heads, strict=True)
            ]
        joined = tuple(bool(has_joined) for _, has_joined in heads)
        newly_joined = [rank for rank in range(self._links.size) if joined[rank] and not self._joined[rank]]
        self._joined = joined
        self._last_joined = max(newly_joined, default=self._last_joined)
        entries = {block: entries_of(block) for block in set(blocks)}  # parsed once per distinct message
        verdict = agree([entries[block] for block in blocks], joined)
        by_key = {request.key: request for request in requests}
        _mark_late([by_key[name] for name in verdict.agreed if name in by_key], states)
        self._carry_out(verdict, by_key)
        if all(joined):
            self._joined = (False,) * self._links.size
            self._pending.finish_join(self._links.ranks[self._last_joined])
        if verdict.agreed or verdict.mismatched or newly_joined:
            return True
        active = [rank for rank in range(self._links.size) if not joined[rank]]
        if all(states[rank] & WAITING for rank in active):
            chosen = next((rank for rank in active if states[rank] & CAN_GIVE_BACK), None)
            if chosen == self._links.rank:
                self._pending.give_back(requests)
        return False

    def _carry_out(self, verdict: Verdict, requests: dict[bytes, Collective]) -> None:
        """Execute the agreed requests, with zeros if this worker has joined, and fail the mismatched ones."""
        descriptions = self._describe([*verdict.mismatched, *verdict.lacking], requests)
        errors = {name: explain_mismatch(descriptions[name]) for name in verdict.mismatched}
        for name in verdict.lacking:
            kind = kind_of(next(iter(descriptions[name].values())))
            if not kind.joinable:
                errors[name] = f"{kind.kind.capitalize()} is not supported with Join at this time."
        for name, error in errors.items():
            if name in requests:
                self._pending.fail([requests[name]], error)
        agreed, joining = [], self._pending.joining
        for name in verdict.agreed:
            if name in requests:
                agreed.append(requests[name])
            elif joining is not None and name not in errors:
                description, device = next(iter(descriptions[name].values())), joining[1]
                accelerator.use(device)  # this may be this thread's first work on it
                agreed.append(kind_of(description).of_zeros(description, device))
        self.execute([request for request in agreed if request.key not in errors])

    def _describe(
        self, names: Sequence[bytes], requests: dict[bytes, Collective]
    ) -> dict[bytes, dict[int, dict[str, Any]]]:
        """Exchange descriptions of these requests; return them by name and global rank."""
        if not names:
            return {}
        mine = {name.hex(): requests[name].describe() for name in names if name in requests}
        replies = [json.loads(reply) for reply in self._links.control.exchange_bytes(json.dumps(mine).encode())]
        return {
            name: {
                rank: reply[name.hex()]
                for rank, reply in zip(self._links.ranks, replies, strict=True)
                if name.hex() in reply
            }
            for name in names
        }


def _state_of(requests: Sequence[Collective]) -> int:
    """Return this worker's state, as a byte of its message."""
    state = 0
    for request in requests:
        if request.awaited:
            state |= WAITING | (CAN_GIVE_BACK if request.revocable else 0)
        if request.late:
            state |= LATE
    return state


def _mark_late(requests: Sequence[Collective], states: Sequence[int]) -> None:
    """Mark agreed requests that a worker, by its state, may have submitted as late."""
    if any(state & LATE for state in states):
        for request in requests:
            request.has_late_peer = True
