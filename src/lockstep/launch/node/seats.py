"""The places of one generation's workers on this host, and the variables of each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.diagnosis import flight_recorder
from lockstep.launch.node.staying_workers import StayingWorkers
from lockstep.launch.node.worker_watch import Seat, Worker
from lockstep.launch.plan.worker_variables import handed_on, horovod_variables, threads, torchrun_variables
from lockstep.launch.protocol.messages import NodeJob
from lockstep.launch.protocol.reachability import proof
from lockstep.world import LOSS, NODE_PROCESS, RESTART_COUNT, SNAPSHOTS
from lockstep.world.devices import usable_cores
from lockstep.world.interfaces import LOOPBACK_INTERFACE, addresses, interface_of, only_interface


class Seats:
    """Assigns the places.

    Attributes:
        environment: The variables that are the same in each generation.
    """

    def __init__(self, job: NodeJob, staying: StayingWorkers) -> None:
        self._job = job
        self._staying = staying
        self.environment = {**handed_on(os.environ), **job.environment}
        if "OMP_NUM_THREADS" not in self.environment:
            self.environment["OMP_NUM_THREADS"] = str(threads(usable_cores(), job.workers))

    def common(self, address: str, own: str) -> dict[str, str]:
        """Return the variables of all workers of this generation, for a store at an address.

        Args:
            own: This host's address on the route there.
        """
        job = self._job
        interface = LOOPBACK_INTERFACE if address.startswith("127.") else interface_of(own)
        run_id = proof(job.secret, "run").hex()[:16]  # the workers see this, so it is not the secret
        found = {**self.variables(interface), "TORCHELASTIC_RUN_ID": run_id, SNAPSHOTS: job.snapshots, LOSS: job.loss}
        self.environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun has it
        self.environment.setdefault(*flight_recorder.VARIABLE)
        return {name: value for name, value in found.items() if value}

    def variables(self, interface: str) -> dict[str, str]:
        """Return the workers' variables that depend on the route to the first host."""
        variables = {"HOROVOD_HOSTNAME": self._job.host}
        if interface:
            variables["HOROVOD_GLOO_IFACE"] = interface
            found = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": self._for_nccl(interface)}
            variables |= {name: value for name, value in found.items() if value and name not in self.environment}
        return variables

    def _for_nccl(self, interface: str) -> str:
        """Return NCCL's interfaces, or "" to let it choose: it combines the bandwidth of several interfaces."""
        if interface == LOOPBACK_INTERFACE:
            # NCCL chooses once in a process, which may stay when another host is added.
            return "" if self._job.is_elastic else f"={interface}"  # without "=", eth1 would also match eth10
        if self._job.interfaces:
            return f"={','.join(self._job.interfaces)}"
        return f"={interface}" if only_interface(addresses()) == interface else ""

    def arrange(
        self, kept: Sequence[Worker], common: Mapping[str, str], address: str, port: int, errors: Path
    ) -> list[Seat]:
        """Return the places: those of workers that stay, with their local ranks, and free ones.

        Args:
            kept: The workers that wait; some may have no place.
            common: The variables of all workers of this generation.
            errors: The folder for their error files.
        """
        kept = sorted(kept, key=lambda worker: worker.rank)
        must_lead = any(self._staying.must_lead(worker.number) for worker in kept)
        # Training lets the worker with local rank 0 act for its host.
        staying = [each for each in kept if must_lead or each.local_rank < self._job.workers][: self._job.workers]
        by_local_rank: dict[int, Worker | None] = {worker.local_rank: worker for worker in staying}
        for local_rank in range(self._job.workers + len(by_local_rank)):
            if len(by_local_rank) < self._job.workers:
                by_local_rank.setdefault(local_rank, None)
        seats = []
        order = by_local_rank if must_lead else sorted(by_local_rank)  # those that stay come first, or keep their ranks
        for place, local_rank in enumerate(order):
            stays = by_local_rank[local_rank]
            number = stays.number if stays else next(self._staying.numbers)
            own = self._of_worker(place, local_rank, address, port)
            own["TORCHELASTIC_ERROR_FILE"] = str(errors / f"{place}.json")
            if self._job.is_elastic:
                own[NODE_PROCESS] = self._staying.address_for(number)
            seats.append(Seat(number, local_rank, {**common, **own}, stays))
        return seats

    def _of_worker(self, place: int, local_rank: int, address: str, port: int) -> dict[str, str]:
        """Return the variables with a worker's rank info."""
        job = self._job
        variables = {
            **torchrun_variables(job.node, place, job.slots, address, port),
            RESTART_COUNT: str(job.generation),
            "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        }
        variables |= horovod_variables(variables, job.slots)
        return variables | {"LOCAL_RANK": str(local_rank), "HOROVOD_LOCAL_RANK": str(local_rank)}
