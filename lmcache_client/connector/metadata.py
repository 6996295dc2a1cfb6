"""The data that the scheduler side and the worker side of the connector exchange through vLLM."""

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from lmcache_client.contract.messages import Load, Store


@dataclass
class LoadJob:
    """One request's load. `job_id` identifies the destination blocks, which are held until it is settled."""

    job_id: int
    request_id: str
    message: Load
    leases: tuple[int, ...] = ()
    """Instead of the message's: the lease of each server."""


@dataclass
class StoreJob:
    """One step's stores. `job_id` identifies the source blocks, which are held until it is settled."""

    job_id: int
    message: Store


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Goes from the scheduler to the workers in every step."""

    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    idle: bool = False
    """The step computes nothing, so the workers may wait briefly for the server."""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Goes from the workers to the scheduler: for each job, how many workers have settled it in this step."""

    settled: Counter[int] = field(default_factory=Counter)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        assert isinstance(other, WorkerReport)
        return WorkerReport(self.settled + other.settled)
